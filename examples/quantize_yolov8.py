"""Quantize a YOLOv8 that Ultralytics exported, print all decisions, and write the model.

    yolo export model=yolov8n.pt format=onnx opset=17 simplify=True
    python examples/quantize_yolov8.py yolov8n.onnx images/ yolov8n_qdq.onnx

``images/`` contains a few hundred images like those of the deployment. No labels are needed.
"""

from __future__ import annotations

import sys

import calibration
import qdqtool
from qdqtool.errors import QdqtoolError


def main(model: str, images: str, output: str) -> int:
    # These values are the defaults, which are the values of Ultralytics. You can set other values
    # here.
    preprocess = calibration.Preprocess(resize="letterbox", bgr=False, scale=1 / 255)

    # With the cache, another run with another method or other float nodes takes a second.
    result = qdqtool.insert(
        model,
        images,
        preprocess=preprocess,
        calib_cache=f"{output}.calib.npz",
        target="trt8.5",
        progress=True,
    )

    print(f"{len(result.activations)} activations and {len(result.weights)} weights quantized")
    for node in result.skipped:
        print(f"float: {node.node}: {node.reason}")
    for group in result.groups:
        worst = max(group.members, key=lambda m: m.bits_lost)
        print(
            f"{len(group.members)} tensors share a scale; {worst.tensor} loses {worst.bits_lost:.1f} bits"
        )
    for warning in (*result.warnings, *result.calibration["warnings"]):
        print(f"warning: {warning}")

    # The prediction needs no GPU.
    assert result.prediction is not None
    summary = result.prediction.summary()
    print(
        f"{summary['int8']} of {summary['convolutions']} convolutions INT8, remaining conversions: {summary['conversions']}"
    )
    for finding in result.prediction.findings:
        if finding.severity != "info":
            print(f"{finding.code}: {finding.message}; {finding.fix}")

    result.save(output)
    print(f"wrote {output}; build it with: trtexec --onnx={output} --int8 --fp16")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: quantize_yolov8.py MODEL.onnx IMAGES OUTPUT.onnx")
    try:
        sys.exit(main(*sys.argv[1:]))
    except QdqtoolError as error:
        sys.exit(f"quantize_yolov8.py: {error}")
