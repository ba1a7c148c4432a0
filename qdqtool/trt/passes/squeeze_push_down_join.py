"""SqueezePushDownJoin."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network, Tensor
from qdqtool.trt.passes._infra import Pass, constant_of, only_q
from qdqtool.trt.passes.vanilla_swap_with_following_q import swap
from qdqtool.trt.trace import RUNNING, SQUEEZE, SWAPPING


class SqueezePushDownJoin(Pass):
    """Moves the reshape behind a Gemm turned convolution past its bias.

    Cases:
        * CONVOLUTION -> ``reshape_after_Gemm`` -> ELEMENTWISE with a constant: the constant gets
          ``unsqueeze_node_after_...``, the result ``squeeze_after_...`` (resnet18-qat-rtx2000-trt8510).
        * An activation in place of the bias: the reshape moves behind it, so that it can be fused (assumed).
        * A Q behind it moves up past the pushed reshape, as past any other, so that the convolution can take it
          (assumed: the fully connected layers of all published engines are the last of their network).
    """

    def apply(self, network: Network) -> None:
        for squeeze in network.of_kind(net.SHUFFLE):
            if not squeeze.attrs.get("squeeze_after") or squeeze.attrs.get("pushed"):
                continue
            reader, producer = squeeze.out.only_reader(), squeeze.data.producer
            if reader is None or producer is None or reader.kind not in (net.ELEMENTWISE, net.ACTIVATION):
                continue
            data = 0 if reader.inputs[0] is squeeze.out else 1
            if reader.kind == net.ELEMENTWISE:
                constant = constant_of(reader.inputs[1 - data]) if len(reader.inputs) == 2 else None
                if constant is None:
                    continue
            self.running(squeeze)
            self.event(SQUEEZE, producer.name, f"{squeeze.name} --> {reader.name}")
            if reader.kind == net.ELEMENTWISE:
                assert constant is not None
                self._unsqueeze(network, reader, 1 - data, constant)
            else:
                self.assume(producer)
            after = self._push(network, squeeze, reader, data)
            q = only_q(after.out)
            if q is not None and not q.attrs.get("computed_scale") and not (q.quant and q.quant.per_channel):
                self.event(RUNNING, after.name, pass_name="VanillaSwapWithFollowingQ")
                self.event(SWAPPING, after.name, q.name, pass_name="VanillaSwapWithFollowingQ")
                swap(network, after, q)
                self.assume(producer)

    @staticmethod
    def _unsqueeze(network: Network, reader: Layer, position: int, constant: Layer) -> None:
        """Gives the constant the rank of what the convolution writes."""
        operand = reader.inputs[position]
        unsqueeze = Layer(net.SHUFFLE, f"unsqueeze_node_after_{constant.name}_{operand.name}")
        unsqueeze.rank = constant.rank
        network.insert_before(reader, position, unsqueeze, Tensor(f"{unsqueeze.name}_out_tensor"))

    @staticmethod
    def _push(network: Network, squeeze: Layer, reader: Layer, position: int) -> Layer:
        network.set_input(reader, position, squeeze.data)
        out = reader.out
        wide = Tensor(f"{reader.name}_out_tensor", out.source, out.elem_type)
        network.remove(squeeze)
        network.set_output(reader, wide)
        after = Layer(net.SHUFFLE, f"copied_squeeze_after_{reader.name}")
        after.rank = (reader.rank[0] + 0.25, 0)
        after.attrs.update(squeeze_after=True, pushed=True, no_op=True)
        return network.add(after, [wide], [out])
