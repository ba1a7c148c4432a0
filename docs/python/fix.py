"""Repair a Q/DQ model: each fix is kept only if the prediction improves and the outputs do not get worse."""

import qdqtool

# A model to repair: the tensors that a Concat joins have different scales.
broken = qdqtool.insert("yolov8n.onnx", "images/", unify=False, max_images=16)
fixed = qdqtool.fix(broken.model, data="images/")
fixed.save("fixed.onnx")
print(fixed)
print(
    "conversions:",
    fixed.before.summary()["conversions"],
    "->",
    fixed.after.summary()["conversions"],
)
for attempt in fixed.applied[:2]:
    print(attempt.code, "at", attempt.node)
