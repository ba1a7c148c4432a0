"""Write one HTML page about a model, here with the float model before it."""

import qdqtool

page = qdqtool.report("yolov8n_qdq.onnx", before="yolov8n.onnx", gpu="RTX 3060")
page.save("report.html")
print(page)
