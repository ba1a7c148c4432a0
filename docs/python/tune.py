"""Find the fastest placement that keeps the accuracy. Use more images than in this example."""

import qdqtool

tuning = qdqtool.tune(
    "yolov8n.onnx",
    "images/",
    gpu="RTX 3060",
    keep=0.6,
    max_images=16,
    chosen_on=4,
    judged_on=4,
)
tuning.save("tuned_qdq.onnx")
print(tuning)
print(tuning.chosen.cost.int8, "convolutions in INT8:", round(tuning.chosen.cost.ms, 2), "ms")
