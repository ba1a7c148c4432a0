"""Write an HTML page about a Q/DQ model, compared with its float model."""

import qdqtool

page = qdqtool.report("yolov8n_qdq.onnx", before="yolov8n.onnx", gpu="RTX 3060")
page.save("report.html")
print(page)
