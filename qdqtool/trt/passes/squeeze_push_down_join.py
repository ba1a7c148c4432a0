"""SqueezePushDownJoin."""

from qdqtool.trt.layers import (
    Layer,
    Tensor,
    can_absorb,
    constant_before,
    create_shuffle,
    q_after,
    rank_after,
)
from qdqtool.trt.passes._infra import SWAPPING, LayerKind, Network, Pass, assumed, seen
from qdqtool.trt.trace import SQUEEZE

BIAS = seen(
    "bias",
    "The reshape behind a Gemm turned convolution moves past the bias.",
    "resnet18-qat-rtx2000-trt8510:2571",
    source="the constant gets unsqueeze_node_after_..., the result copied_squeeze_after_...",
    about=("Add",),
)
ACTIVATION = assumed(
    "activation",
    "An activation in place of the bias: the reshape moves behind it, so that it can be fused.",
    "otherwise no hidden fully connected layer could write INT8",
    about=("Relu",),
)
FOLLOWED = assumed(
    "followed-by-q",
    "A Q behind the pushed reshape moves up past it, so that the convolution can take it.",
    "the fully connected layers of all published engines are the last of their network",
)


class SqueezePushDownJoin(Pass):
    """Moves the reshape behind a Gemm turned convolution past its bias."""

    cases = (BIAS, ACTIVATION, FOLLOWED)
    anonymous_lines = (SQUEEZE,)
    is_compared = False

    def apply(self, network: Network) -> None:
        for squeeze, reader in network.single_consumer_pairs(LayerKind.SHUFFLE):
            producer = squeeze.data.producer
            if (
                not squeeze.shuffling.after_matmul
                or squeeze.shuffling.is_pushed_down
                or producer is None
            ):
                continue
            data = reader.inputs.index(squeeze.out)
            constant: Layer | None = None
            if reader.kind == LayerKind.ELEMENTWISE and len(reader.inputs) == 2:
                constant = constant_before(reader.inputs[1 - data])
            if constant is None and reader.kind != LayerKind.ACTIVATION:
                continue
            case = BIAS if constant is not None else ACTIVATION
            self.fire_running(case, squeeze)
            self.fire(case, producer, SQUEEZE, producer.name, f"{squeeze.name} --> {reader.name}")
            if constant is not None:
                self._unsqueeze(network, reader, 1 - data, constant)
            after = self._push(network, squeeze, reader, data)
            q = q_after(after.out)
            if q is not None and can_absorb(q):
                self.fire_running(FOLLOWED, after, by="VanillaSwapWithFollowingQ")
                self.fire(
                    FOLLOWED, producer, SWAPPING, after.name, q.name, by="VanillaSwapWithFollowingQ"
                )
                network.swap(after, q)

    @staticmethod
    def _unsqueeze(network: Network, reader: Layer, position: int, constant: Layer) -> None:
        """Gives the constant the rank of what the convolution writes."""
        operand = reader.inputs[position]
        unsqueeze = create_shuffle(
            f"unsqueeze_node_after_{constant.name}_{operand.name}", constant.rank
        )
        network.insert_before(reader, position, unsqueeze, Tensor(f"{unsqueeze.name}_out_tensor"))

    @staticmethod
    def _push(network: Network, squeeze: Layer, reader: Layer, position: int) -> Layer:
        network.set_input(reader, position, squeeze.data)
        out = reader.out
        wide = Tensor(f"{reader.name}_out_tensor", out.source, out.elem_type)
        network.remove(squeeze)
        network.set_output(reader, wide)
        after = create_shuffle(f"copied_squeeze_after_{reader.name}", rank_after(reader.rank))
        after.shuffling.after_matmul = after.shuffling.is_pushed_down = True
        after.shuffling.reorders_values, after.shuffling.perm = (
            squeeze.shuffling.reorders_values,
            squeeze.shuffling.perm,
        )
        return network.add(after, [wide], [out])
