"""Compare a prediction with a real build: a log, or the layer JSON of `trtexec --exportLayerInfo`."""

import json

import qdqtool

# Instead of the layer JSON of your build: as predicted, except one convolution in FP16.
prediction = qdqtool.predict("yolov8n_qdq.onnx", target="trt8.6")
layers = []
for number, conv in enumerate(prediction.convolutions):
    types = [conv.precision, conv.output] if number != 5 else ["FP16", "FP16"]
    formats = ["Int8" if t == "INT8" else "Half" for t in types]
    tensors = [
        {"Name": f"{conv.name}/{side}", "Format/Datatype": f}
        for side, f in zip(("input", "output"), formats, strict=True)
    ]
    layer = {"Name": conv.layer or conv.name, "LayerType": "CaskConvolution"}
    layers.append({**layer, "Inputs": tensors[:1], "Outputs": tensors[1:]})
with open("layers.json", "w") as file:
    json.dump({"Layers": layers}, file)

verification = qdqtool.verify("yolov8n_qdq.onnx", "layers.json", target="trt8.6")
print(verification)
print("ok:", verification.ok)
for mismatch in verification.mismatches:
    print(mismatch.name, mismatch.predicted["precision"], "->", mismatch.built["precision"])
