from qdqtool.trt.passes._infra import (
    LayerKind,
    Network,
    Pass,
    assumed,
    constant_before,
    join_names,
    seen,
)

IDENTITY = seen(
    "identity",
    "An Identity is folded into the constant that it reads, even if other layers read the "
    "constant too.",
    "yolo-resnet18-orin-trt8502:4713",
    about=("Identity",),
)
CAST = assumed(
    "cast",
    "A Cast of weights is folded once the DQ has moved down past the Cast (FP16 exports).",
    "the parser adds an Identity layer for both; no log of such an export is available",
    about=("Cast",),
)


class ConstCastFold(Pass):
    """Folds an Identity or Cast of a constant into the constant: ``<constant> + <identity>``."""

    cases = (IDENTITY, CAST)
    is_compared = False

    def _apply(self, network: Network) -> None:
        for identity in network.layers_of_kind(LayerKind.IDENTITY):
            constant = constant_before(identity.data)
            if constant is None:
                continue
            case = CAST if identity.op == "Cast" else IDENTITY
            if constant.out.single_consumer():
                self.fuse_consumer(network, case, constant, identity)
                continue
            self.fire_fusing(case, constant, constant, identity)
            network.drop_input(identity, 0)
            network.set_kind(identity, LayerKind.CONSTANT)
            identity.dims, identity.name = constant.dims, join_names(constant, identity)
            identity.add_cases(case)
