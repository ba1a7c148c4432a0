"""Child process of shapes.py: read a model from stdin, write the result to stdout.

Arguments: memory limit in bytes, then `infer CHECK_TYPE STRICT_MODE DATA_PROP` (0 or 1 each) or
`convert OPSET`. If onnx rejects the model, the exit code is 1, and the last line of stderr is the
reason.
"""

import os
import sys


def main() -> None:
    """Run the task of the command line."""
    memory, task, *numbers = sys.argv[1:]
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # onnx's C++ code prints to stdout, which must contain only the model
    _limit_memory(int(memory))
    source = sys.stdin.buffer.read()
    import onnx
    from onnx import shape_inference, version_converter

    model = onnx.ModelProto.FromString(source)
    try:
        if task == "infer":
            result = shape_inference.infer_shapes(model, *(bool(int(n)) for n in numbers))
        else:
            result = version_converter.convert_version(model, int(numbers[0]))
    except MemoryError:
        sys.exit(f"onnx takes more than {int(memory) >> 20} MB")
    except Exception as error:
        sys.exit(str(error) or type(error).__name__)
    output.write(result.SerializeToString())
    output.flush()


def _limit_memory(size: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


if __name__ == "__main__":
    main()
