"""ResNet-18 through ModelOpt: quantizers placed, calibrated, exported, and the export predicted."""

import torch
from resnet import ResNet18

from qdqtool import qat
from qdqtool.testing import assert_int8

torch.manual_seed(0)
model = ResNet18(classes=10)  # take your trained network here
images = torch.randn(8, 3, 224, 224)  # and real images here
qat.prepare(model, images[:1], backend="modelopt")
qat.calibrate(model, images.split(4), method="mse")
# Fine-tune here, as you trained before.
done = qat.export(model, "resnet18_modelopt_qdq.onnx", images[:1], dynamic_batch=True)
print(done.summary)
assert_int8(done.path, max_conversions=1)
