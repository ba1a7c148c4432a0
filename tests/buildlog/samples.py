import io
import json
from pathlib import Path
from typing import Any

from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.types import Build

STAMP = "[10/31/2025-17:53:3{}]"
BANNER = (
    "&&&& {} TensorRT.trtexec [TensorRT v8502] # /usr/src/tensorrt/bin/trtexec --onnx=net_qdq.onnx --int8 "
    "--verbose --dumpProfile"
)


def trtexec_log() -> str:
    return (Path(__file__).parents[1] / "data" / "logs" / "small-trt852.txt").read_text("utf-8")


def build_of(*files: str | bytes | list[str] | dict[str, Any]) -> Build:
    texts = (
        "\n".join(file)
        if isinstance(file, list)
        else json.dumps(file)
        if isinstance(file, dict)
        else file
        for file in files
    )
    return read_build(
        *(io.BytesIO(text.encode() if isinstance(text, str) else text) for text in texts)
    )


def stamped(level: str, text: str, second: int = 0) -> str:
    logger = "[TRT] " if level in ("V", "W") else ""
    return f"{STAMP.format(second)} [{level}] {logger}{text}"
