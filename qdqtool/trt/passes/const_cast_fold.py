"""ConstCastFold."""

from qdqtool.trt.passes._infra import (
    LayerKind,
    Network,
    Pass,
    assumed,
    constant_of,
    joined_name,
    seen,
)

IDENTITY = seen(
    "identity",
    "An Identity of a constant is folded into it; for each of several readers.",
    "yolo-resnet18-orin-trt8502:4713",
    about=("Identity",),
)
CAST = assumed(
    "cast",
    "A Cast of weights that their DQ moved past is folded (half-precision exports).",
    "the parser makes an Identity layer of both; no log of such an export is available",
    about=("Cast",),
)


class ConstCastFold(Pass):
    """Folds an Identity or Cast of a constant into the constant: ``<constant> + <identity>``."""

    cases = (IDENTITY, CAST)
    compared = False

    def apply(self, network: Network) -> None:
        for identity in network.of_kind(LayerKind.IDENTITY):
            constant = constant_of(identity.data)
            if constant is None:
                continue
            case = CAST if identity.op == "Cast" else IDENTITY
            if constant.out.only_reader():
                self.join(network, case, constant, identity)
                continue
            self.fusing(case, constant, constant, identity)
            network.drop_input(identity, 0)
            network.set_kind(identity, LayerKind.CONSTANT)
            identity.dims, identity.name = constant.dims, joined_name(constant, identity)
            identity.rest_on(case)
