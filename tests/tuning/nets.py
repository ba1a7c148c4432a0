from collections.abc import Sequence

import numpy as np
import onnx

from calibration.arrays import open_data
from calibration.session import input_specs
from qdqtool.accuracy.metrics import choose_metric
from qdqtool.insertion.output_errors import find_last_convolution_outputs
from qdqtool.insertion.placement import PlacementRules
from qdqtool.insertion.prepare import prepare_float_model
from qdqtool.insertion.ranges import collect_statistics
from qdqtool.insertion.scales import MethodChoice
from qdqtool.ir.graph import Model
from qdqtool.trt.targets import target_named
from qdqtool.tuning.measure import TuningJob
from qdqtool.tuning.planner import Configuration, Planner
from tests.insertion.nets import Net

Array = np.ndarray


def branchy(seed: int = 0) -> onnx.ModelProto:
    net = Net(16, 16, seed=seed)
    x = net.silu("a0", net.conv("c0", "x"))
    y = net.silu("a1", net.conv("c1", x))
    y = net.silu("a2", net.conv("c2", y))
    x = net.op("Add", "add", x, y)
    left, right = net.silu("a3", net.conv("c3", x)), net.silu("a4", net.conv("c4", x))
    last = net.silu("a5", net.conv("c5", net.op("Concat", "cat", left, right, axis=1), 32, 16))
    return net.output(net.conv("c6", last, 16, 8)).model()


def resnet(seed: int = 0, classes: int = 10) -> onnx.ModelProto:
    net = Net(3, 16, seed=seed)
    x = net.op(
        "Relu", "stem/relu", net.norm("stem/bn", net.conv("stem/conv", "x", 3, 16, bias=False))
    )
    x = block(net, "layer1", x, 16, 16, 1)
    x = block(net, "layer2", x, 16, 32, 2)
    x = net.op("Flatten", "flatten", net.op("GlobalAveragePool", "avgpool", x), axis=1)
    weight = net.const("fc.weight", net.rng.standard_normal((classes, 32)) * 0.3)
    bias = net.const("fc.bias", np.zeros(classes))
    return net.output(net.op("Gemm", "fc", x, weight, bias, transB=1)).model()


def block(net: Net, name: str, x: str, cin: int, cout: int, stride: int) -> str:
    first = net.conv(f"{name}/conv1", x, cin, cout, bias=False, stride=stride)
    y = net.op("Relu", f"{name}/relu", net.norm(f"{name}/bn1", first, cout))
    y = net.norm(f"{name}/bn2", net.conv(f"{name}/conv2", y, cout, cout, bias=False), cout)
    if stride > 1:
        down = net.conv(f"{name}/down/conv", x, cin, cout, 1, bias=False, stride=2)
        x = net.norm(f"{name}/down/bn", down, cout)
    return str(net.op("Relu", f"{name}/relu_1", net.op("Add", f"{name}/add", y, x)))


def segmentation(seed: int = 0, classes: int = 5) -> onnx.ModelProto:
    net = Net(3, 16, seed=seed)
    x = net.op("Relu", "r0", net.conv("c0", "x", 3, 16, stride=2))
    x = net.op("Relu", "r1", net.conv("c1", x))
    x, scales = net.conv("c2", x, 16, classes, 1), net.const("scales", [1.0, 1.0, 2.0, 2.0])
    options = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
    return net.output(net.op("Resize", "up", x, "", scales, **options)).model()


def planner_of(
    proto: onnx.ModelProto, data: list[dict[str, Array]], residual: str = "skip"
) -> Planner:
    model = Model(proto).copy()
    prepare_float_model(model)
    planner = Planner(
        model, PlacementRules(residual=residual), target_named("trt8.5"), MethodChoice("mse")
    )
    statistics, _ = collect_statistics(model, data, planner.possible_groups(), max_images=99)
    planner.statistics = statistics.tensors
    return planner


def floats(*names: str) -> Configuration:
    return Configuration(floats=frozenset(names))


def job_of(planner: Planner, data: list[dict[str, Array]]) -> TuningJob:
    model = planner.model
    return TuningJob(
        model.proto.SerializeToString(),
        open_data(data, input_specs(model), max_images=99),
        tuple(find_last_convolution_outputs(model)),
        (),
        choose_metric(model, None),
    )


def open_dimensions(proto: onnx.ModelProto, axes: Sequence[int]) -> None:
    """Make dimensions of the first output dynamic, and also the batch of the first input."""
    for value, opened in ((proto.graph.output[0], axes), (proto.graph.input[0], axes[:1])):
        for axis in opened:
            value.type.tensor_type.shape.dim[axis].dim_param = f"{value.name}{axis}"
