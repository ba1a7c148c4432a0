"""How an engine is built: what allows INT8 and FP16, and how to get a log, for each way that people build.

Findings, ``explain``, ``predict --for`` and the README read this table; nothing else names the flags of another tool.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from qdqtool.errors import QdqtoolError
from qdqtool.trt.targets import Target, target_named
from qdqtool.types import Json


@dataclass(frozen=True, slots=True)
class Way:
    """One way to build.

    Attributes:
        name: As ``--for`` takes it.
        title: In a sentence.
        weak: What allows INT8 and FP16 up to TensorRT 10.
        strong: What holds from TensorRT 11 on, where the ONNX types decide.
        log: How to get a verbose log, for ``qdqtool verify``.
        care: What else to know with a Q/DQ model.
        source: Where that is from.
        typed: What makes a network of TensorRT 10 strongly typed; empty where ``strong`` holds.
    """

    name: str
    title: str
    weak: str
    strong: str
    log: str
    care: str
    source: str
    typed: str = ""

    def flags(self, target: str) -> str:
        """What to give the builder for a target."""
        chosen = target_named(target)
        if not chosen.strongly_typed:
            return self.weak
        return self.strong if not chosen.trtexec.precision_flags or chosen.is_rtx or not self.typed else self.typed

    def as_json(self, target: str) -> Json:
        return {"way": self.name, "flags": self.flags(target), "log": self.log, "care": self.care,
                "source": self.source}


WAYS: dict[str, Way] = {
    w.name: w
    for w in (
        Way(
            "trtexec", "trtexec",
            "trtexec --onnx=model.onnx --int8 --fp16",
            "no precision flags: trtexec 11 knows neither --int8 nor --fp16, the ONNX types decide",
            "add --verbose --profilingVerbosity=detailed > build.log 2>&1",
            "--fp16 without --int8 does not build a Q/DQ model; --calib has no effect on one",
            "trtexec's option parser, 8.0 to 11; NVIDIA/TensorRT issues 550, 3762, 4021",
            "trtexec --onnx=model.onnx --stronglyTyped, without --int8 and --fp16",
        ),
        Way(
            "python", "the TensorRT Python API",
            "config.set_flag(trt.BuilderFlag.INT8); config.set_flag(trt.BuilderFlag.FP16)",
            "no builder flags: trt.BuilderFlag has neither INT8 nor FP16, the ONNX types decide",
            "trt.Logger(trt.Logger.VERBOSE), config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED, and keep "
            "what it prints",
            "set no int8_calibrator and no dynamic ranges: with Q/DQ in the network the scales are in the model "
            "(\"Calibrator won't be used in explicit precision mode\")",
            "TensorRT's Python API; NVIDIA/TensorRT issues 550, 1837; release notes of 11.0",
            "builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)), no builder flags",
        ),
        Way(
            "onnxruntime", "onnxruntime's TensorRT provider",
            "provider options {\"trt_int8_enable\": True, \"trt_fp16_enable\": True}",
            "neither trt_int8_enable nor trt_fp16_enable can change anything where TensorRT is strongly typed: the "
            "ONNX types decide",
            "provider option \"trt_detailed_build_log\": True and session option log_severity_level = 0, and keep what "
            "it prints on stderr",
            "give no trt_int8_calibration_table_name for a Q/DQ model: dynamic ranges are refused there (\"Setting "
            "dynamic range is only allowed when there are no Q/DQ layers in the Network\"). Set "
            "graph_optimization_level to ORT_DISABLE_ALL if the engine does not build though trtexec builds it: "
            "onnxruntime rewrites Q/DQ before TensorRT sees it. Each TensorRT subgraph is an engine of its own",
            "microsoft/onnxruntime pull requests 8969, 17482, issues 13071, 13381, 17312; the provider's source",
        ),
        Way(
            "torch-tensorrt", "Torch-TensorRT",
            "torch_tensorrt.compile(..., enabled_precisions={torch.float32, torch.float16, torch.int8})",
            "no enabled_precisions (refused together with use_explicit_typing=True): the types of the PyTorch model "
            "decide",
            "compile inside \"with torch_tensorrt.logging.debug():\" and keep what it prints",
            "it takes a PyTorch model with Q/DQ inside (ModelOpt), not this ONNX file: layers have other names, so "
            "that placement carries over and names in findings do not",
            "Torch-TensorRT user guide, quantization; pytorch/TensorRT pull request 3058, issues 4070, 4099",
        ),
        Way(
            "deepstream", "DeepStream (nvinfer)",
            "build the engine with trtexec --int8 --fp16, then model-engine-file=model.engine and network-mode=1 "
            "(0 is FP32, 1 INT8, 2 FP16)",
            "build the engine with trtexec of the same TensorRT, then model-engine-file=model.engine",
            "take trtexec's: --verbose --profilingVerbosity=detailed > build.log 2>&1",
            "from an ONNX file nvinfer sets the INT8 flag only with a calibration table and else says \"INT8 "
            "calibration file not specified. Trying FP16 mode.\", which does not build a Q/DQ model; int8-calib-file "
            "itself has no use with Q/DQ. Seen in the source of the 5.x plugin; later ones say the same line",
            "source of nvdsinfer_context_impl; DeepStream guide, Gst-nvinfer; levipereira/yolov9-qat issue 20",
        ),
    )
}

_ALSO = {"ort": "onnxruntime", "ort-trt": "onnxruntime", "torch_tensorrt": "torch-tensorrt", "torchtrt":
         "torch-tensorrt", "nvinfer": "deepstream", "api": "python"}


def way_named(name: str) -> Way:
    """The way of that name.

    Raises:
        QdqtoolError: There is none.
    """
    text = name.strip().lower()
    found = WAYS.get(_ALSO.get(text, text))
    if found is None:
        import difflib

        near = difflib.get_close_matches(text, WAYS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise QdqtoolError(f"unknown way to build '{name[:40]}'; {hint}choose one of {', '.join(WAYS)}")
    return found


def trtexec_command(target: Target, model: str) -> str:
    """How trtexec of a target's version builds a model, with a log for ``qdqtool verify``.

    From 11 on there are no precision flags, and none are allowed in a strongly typed network; weakly typed ones of 8 to
    10 need ``--int8``, and ``--fp16`` for what is not quantized (10.15 runs Q/DQ in INT8 without, and warns of both
    from 10.12 on). The listing is asked for from 8.2 on.
    """
    words = ["trtexec", f"--onnx={shlex.quote(model)}"]
    if not target.strongly_typed:
        words += ["--int8", "--fp16"]
    elif target.trtexec.precision_flags:
        words.append("--stronglyTyped")
    words.append("--verbose")
    if target.trtexec.lists_layers:
        words.append("--profilingVerbosity=detailed")
    return " ".join([*words, "> build.log 2>&1"])


def fp16_words(way: str | None) -> tuple[str, str]:
    """What FLAG-FP16 says: the consequence and the fix, in the words of a way, or of the usual ones."""
    if way is not None:
        chosen = WAYS[way]
        return f"what is not quantized runs in FP32 unless {chosen.title} allows FP16 as well.", f"{chosen.weak}."
    return (
        "what is not quantized runs in FP32 unless the builder gets --fp16 as well.",
        f"{WAYS['trtexec'].weak} ... (--for tells the words of {', '.join(w for w in WAYS if w != 'trtexec')}).",
    )
