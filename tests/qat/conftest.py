"""Before the tests of training are imported: Lightning and Ultralytics import torchvision where it is installed."""

from __future__ import annotations

from tests.qat.torchvision_ops import usable_torchvision

usable_torchvision()
