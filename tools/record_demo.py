"""Record names and data types of the convolutions that TensorRT-RTX builds for the demo.

usage: python -m tools.record_demo

The script needs tensorrt_rtx. Run the script again if the demo's model or its placement changes.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from qdqtool.demo.images import write_images
from qdqtool.demo.network import yolov8n
from qdqtool.demo.recording import RECORDING, hash_structure
from qdqtool.ir.modelfile import load, save
from qdqtool.ir.precision import Precision
from qdqtool.quantization.api import insert
from qdqtool.verification.local_build import build_model

SIZE = 320  # the demo's default


def quantized_demo(folder: Path, images: int, **others: Any) -> Path:
    """Return the path of the demo's default model with Q/DQ, calibrated with its first images.

    ``others`` are other options of :func:`qdqtool.quantization.api.insert`.
    """
    model, quantized = folder / "demo.onnx", folder / "demo_qdq.onnx"
    (folder / "images").mkdir()
    save(yolov8n(SIZE), model)
    write_images(folder / "images", images, SIZE)
    insert(model, folder / "images", target="trt8.5", **others).save(quantized)
    return quantized


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = quantized_demo(Path(folder), 100)
        result = build_model(path, "tensorrt-rtx")
        if result.status != "built":
            raise SystemExit(f"{result.status}: {result.message}")
        table = {
            "what": "the demo's default model as TensorRT-RTX built it: data types of its convolutions",
            "tensorrt": result.version,
            "structure": hash_structure(load(path)),
            "convolutions": [
                {"name": n.name, "precision": str(n.precision), "output": str(n.output)}
                for n in result.nodes
                if n.precision != Precision.UNKNOWN
            ],
        }
    RECORDING.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{RECORDING}: {len(result.nodes)} convolutions")


if __name__ == "__main__":
    main()
