from qdqtool.ir.precision import Precision
from qdqtool.trt.result import EngineLayer, Prediction, TensorPrecision
from qdqtool.trt.trace import render

_WORDS = {Precision.INT8: "Int8", Precision.FP16: "Half"}


def engine_line(layer: EngineLayer) -> str:
    def side(edges: list[TensorPrecision], shape: str) -> str:
        return ", ".join(f"{t.tensor} ({_WORDS.get(t.precision, 'Float')}[{shape}])" for t in edges)

    # A prediction has no shapes. Those of convolutions are dynamic, as they are compared with the
    # model's.
    inputs = side(layer.inputs, "1,8,8,8")
    outputs = side(layer.outputs, "1,8,8,-1" if layer.type == "Convolution" else "1,8,8,8")
    kind = {
        "Convolution": "CaskConvolution",
        "Conversion": "Reformat",
        "ConvActPool": "ConvActPool",
    }.get(layer.type, layer.type)
    return f"Layer({kind}): {layer.name}, Tactic: 0x0000000000000001, {inputs} -> {outputs}"


def log_of(
    prediction: Prediction, version: str = "8502", flags: str = "--int8 --fp16"
) -> list[str]:
    stamp = "[11/21/2026-12:00:00] "
    head = [
        f"&&&& RUNNING TensorRT.trtexec [TensorRT v{version}] # trtexec --onnx=m.onnx {flags} --verbose",
        f"{stamp}[I] TensorRT version: {version[0]}.{version[1]}.{int(version[2:])}",
        f"{stamp}[V] [TRT] Original: 100 layers",
        f"{stamp}[V] [TRT] After dead-layer removal: 100 layers",
        f"{stamp}[V] [TRT] QDQ graph optimizer quantization pass - Generate quantized ops",
    ]
    passes = [f"{stamp}[V] [TRT] {render(event)}" for event in prediction.trace]
    tail = [
        f"{stamp}[V] [TRT] QDQ graph optimizer quantization epilogue pass",
        f"{stamp}[V] [TRT] After reformat layers: {len(prediction.layers)} layers",
        f"{stamp}[V] [TRT] Graph construction and optimization completed in 0.5 seconds.",
        f"{stamp}[V] [TRT] Engine Layer Information:",
        *(engine_line(layer) for layer in prediction.layers),
        f"{stamp}[I] Engine built in 5 sec.",
        f"&&&& PASSED TensorRT.trtexec [TensorRT v{version}] # trtexec --onnx=m.onnx {flags} --verbose",
    ]
    return [*head, *passes, *tail]
