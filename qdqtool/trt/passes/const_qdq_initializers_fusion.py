from qdqtool.trt import fault_checks
from qdqtool.trt.passes._infra import (
    QDQ,
    REMOVING,
    Case,
    Layer,
    Network,
    Pass,
    assumed,
    constant_before,
    node_name,
    seen,
)

CONSTANT = seen(
    "constant",
    "Each Q and DQ absorbs its constant scale and zero point; a constant without further consumers "
    "is removed.",
    "yolo-resnet18-orin-trt8502:4719",
    "resnet18-qat-rtx2000-trt8510:2184",
    "yolov8-orin-trt8412-excerpts:129",
    "bevfusion-camera-rtx3080ti-trt8600:4303",
)
COMPUTED = assumed(
    "computed",
    "A scale that is computed at run time remains an input of its Q or DQ. No layer can absorb "
    "this Q or DQ.",
    "the documentation requires build-time constants; most builds fail",
)


class ConstQDQInitializersFusion(Pass):
    """Folds scale and zero-point constants into each Q and DQ."""

    cases = (CONSTANT, COMPUTED)
    anonymous_lines = (REMOVING,)

    def _apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(*QDQ):
            case = COMPUTED if layer.has_computed_scale else CONSTANT
            self.fire_running(case, layer)
            name = node_name(layer)
            computed = fault_checks.check_scale_constant(
                self.name, name, name, layer.has_computed_scale
            )
            if computed is not None:
                self.refuse(computed)
            self._fold_constants(network, case, layer)

    def _fold_constants(self, network: Network, case: Case, layer: Layer) -> None:
        inputs = layer.inputs
        while len(inputs) > 1:
            constant = constant_before(inputs[1])
            if constant is None:
                break
            network.drop_input(layer, 1)
            if network.remove_if_unused(constant):
                self.fire(case, layer, REMOVING, constant.name)
