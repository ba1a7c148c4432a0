"""The builds that cases rest on: real logs and engine listings that others published.

The files themselves belong to others and are not part of this project; the graphs behind them, rebuilt, and tables
derived from them are in ``tests/data/evidence``.
"""

from __future__ import annotations

from qdqtool.base.records import record


@record
class Build:
    """One build.

    Attributes:
        name: As cases name it.
        tensorrt: Version.
        gpu: What it was built for; empty where that is not stated.
        flags: What the builder was given.
        network: What was built.
        source: Who published it, and where.
        parts: What of it is available.
        graph: Whether the ONNX graph behind it could be rebuilt, so that the tests hold the simulator to it.
        made_rules: Whether rules were made while looking at it.
    """

    name: str
    tensorrt: str
    gpu: str
    flags: str
    network: str
    source: str
    parts: str
    graph: bool = True
    made_rules: bool = True


_TREX = "NVIDIA/TensorRT, trt-engine-explorer (Apache-2.0)"

BUILDS: dict[str, Build] = {
    b.name: b
    for b in (
        Build(
            "yolo-resnet18-orin-trt8502", "8.5.2", "Orin", "int8", "ResNet-18 with a YOLO neck and LeakyRelu, residual "
            "Adds not quantized", f"{_TREX}, commit 8e449266", "complete log: parse, passes, engine",
        ),
        Build(
            "resnet18-qat-rtx2000-trt8510", "8.5.10", "RTX 2000 Ada", "best", "ResNet-18, residual branch, global "
            "pooling and fc quantized", "lix19937/tensorrt-insight", "complete log: parse, passes, engine",
        ),
        Build(
            "bevfusion-camera-orin-trt8502", "8.5.2", "AGX Orin", "fp16 int8", "ResNet-50 with FPN (linear Resize, "
            "Concat) and a depth branch, skips quantized", "hehern/bevfusion_spconv_deploy",
            "passes and engine, transcribed; ConstQDQInitializersFusion counted only",
        ),
        Build(
            "bevfusion-camera-rtx3080ti-trt8600", "8.6.0", "RTX 3080 Ti", "fp16 int8", "the same network from another "
            "export", "cn-hezhu/BEVFusion-TensorRT-ROS", "complete log: parse, passes, engine, layer JSON",
        ),
        Build(
            "yolov8-orin-trt8412-excerpts", "8.4.12", "Orin", "int8", "YOLOv8-style with Relu, Q/DQ on both inputs of "
            "each Add", "an article of 2024", "excerpts of every phase of the log", graph=False,
        ),
        Build(
            "centernet-resnet34-qat-trt80", "8.0", "", "int8", "ResNet-34 with three ConvTranspose stages, skips "
            "quantized", "an article of 2021", "engine listing",
        ),
        Build(
            "resnet18-a100-qat", "8.4 or 8.5", "A100", "fp16 int8", "ResNet-18, skips float", f"{_TREX} v9.3.0",
            "engine listing",
        ),
        Build(
            "resnet18-a100-qat-residual", "8.4 or 8.5", "A100", "fp16 int8", "ResNet-18, skips quantized",
            f"{_TREX} v9.3.0", "engine listing",
        ),
        Build(
            "resnet18-a100-qat-residual-qgap", "8.4 or 8.5", "A100", "fp16 int8", "ResNet-18, skips and global pooling "
            "quantized", f"{_TREX} v9.3.0", "engine listing",
        ),
        Build(
            "mobilenetv2-titanrtx-qat-residual", "8.4 or 8.5", "TITAN RTX", "fp16 int8", "MobileNetV2, depthwise with "
            "Clip, skips quantized", f"{_TREX} v9.3.0", "engine listing",
        ),
        Build(
            "centerpoint-a100-trt823-fp16", "8.2.3", "A100", "fp16", "CenterPoint's detection network, no Q/DQ",
            "NVIDIA-AI-IOT/Lidar_AI_Solution", "complete log: parse, passes, engine", graph=False,
        ),
        Build(
            "bev-blackwell-trt10", "10 or later", "Blackwell", "int8", "quantized ResNet-34, inside Myelin",
            "lix19937/tensorrt-engine-analysis", "engine listing", graph=False,
        ),
        Build(
            "yolov8n-modelopt-rtx2060-trt1014", "10.14.1 and 8.6.1", "RTX 2060", "strongly typed (10), fp16 int8 (8)",
            "YOLOv8n with SiLU, ModelOpt's placement", "Parker-Lyu/Learn-TensorRT, commit dbfdc408",
            "counts of layers, conversions and reformats", graph=False,
        ),
        Build(
            "small-graphs-orinnano-trt103", "10.3.0", "Orin Nano", "int8", "four small graphs, among them a sum of two "
            "dequantized tensors", "onnxsim/onnxsim, commits 5208cea8, 7d923919", "in words", graph=False,
        ),
        Build(
            "gemm-mlp-trt10", "10", "RTX 30 class", "int8", "three quantized Gemms; two around a Softmax in pieces",
            "Eternal-Raiden-Ying/i-vit-srtp, commit 4730c2e5", "engine listing", graph=False,
        ),
        Build(
            "linear-orinnano-trt103", "10.3", "Orin Nano Super", "fp16 int8", "one MatMul, W8A8 and W8",
            "FlankKaicoder/jetson-qwen-inference-lab, commits 9a577fe1 and later", "engine listing", graph=False,
        ),
    )
}
