"""Quantize and export a ResNet-18 with ModelOpt, and check the prediction."""

import torch
from resnet import ResNet18

from qdqtool import qat
from qdqtool.testing import assert_int8

torch.manual_seed(0)
model = ResNet18(classes=10)  # replace this by your trained network
images = torch.randn(8, 3, 224, 224)  # and this by real images
qat.prepare(model, images[:1], backend="modelopt")
qat.calibrate(model, images.split(4), method="mse")
# Fine-tune the model here with your training loop.
done = qat.export(model, "resnet18_modelopt_qdq.onnx", images[:1], dynamic_batch=True)
print(done.summary)
assert_int8(done.path, max_conversions=1)
