from qdqtool.trt.passes._infra import (
    SQUEEZE,
    SWAPPING,
    Layer,
    LayerKind,
    Network,
    Pass,
    Tensor,
    assumed,
    can_absorb,
    constant_before,
    create_shuffle,
    q_after,
    rank_after,
    seen,
)

BIAS = seen(
    "bias",
    "The reshape after a Gemm that became a convolution moves past the bias.",
    "resnet18-qat-rtx2000-trt8510:2571",
    source="names of the shuffles: unsqueeze_node_after_... for the constant, "
    "copied_squeeze_after_... for the result",
    about=("Add",),
)
ACTIVATION = assumed(
    "activation",
    "The reshape after a Gemm that became a convolution moves past an activation too, so that the "
    "convolution can fuse the activation.",
    "otherwise no hidden fully connected layer could write INT8",
    about=("Relu",),
)
FOLLOWED = assumed(
    "followed-by-q",
    "A Q after the moved reshape moves up past the reshape, so that the convolution can fuse the "
    "Q.",
    "no build shows it: in all published engines, a fully connected layer is the last layer",
)


class SqueezePushDownJoin(Pass):
    """Moves the reshape after a converted Gemm down past the Gemm's bias or activation."""

    cases = (BIAS, ACTIVATION, FOLLOWED)
    anonymous_lines = (SQUEEZE,)
    is_compared = False

    def _apply(self, network: Network) -> None:
        for squeeze, consumer in network.single_consumer_pairs(LayerKind.SHUFFLE):
            shuffling = squeeze.shuffling
            if shuffling.after_matmul and not shuffling.is_pushed_down:
                self._move_past(network, squeeze, consumer)

    def _move_past(self, network: Network, squeeze: Layer, consumer: Layer) -> None:
        producer = squeeze.data.producer
        position = consumer.inputs.index(squeeze.out)
        bias: Layer | None = None
        if consumer.kind == LayerKind.ELEMENTWISE and len(consumer.inputs) == 2:
            bias = constant_before(consumer.inputs[1 - position])
        if producer is None or (bias is None and consumer.kind != LayerKind.ACTIVATION):
            return
        case = BIAS if bias is not None else ACTIVATION
        self.fire_running(case, squeeze)
        self.fire(case, producer, SQUEEZE, producer.name, f"{squeeze.name} --> {consumer.name}")
        if bias is not None:
            _insert_unsqueeze(network, consumer, 1 - position, bias)
        after = _move_squeeze_after(network, squeeze, consumer)
        q = q_after(after.out)
        if q is not None and can_absorb(q):
            logged_pass = "VanillaSwapWithFollowingQ"
            self.fire_running(FOLLOWED, after, logged_pass=logged_pass)
            self.fire(FOLLOWED, producer, SWAPPING, after.name, q.name, logged_pass=logged_pass)
            network.swap(after, q)


def _insert_unsqueeze(network: Network, consumer: Layer, position: int, constant: Layer) -> None:
    name = f"unsqueeze_node_after_{constant.name}_{consumer.inputs[position].name}"
    unsqueeze = create_shuffle(name, constant.rank)
    network.insert_before(consumer, position, unsqueeze, Tensor(f"{unsqueeze.name}_out_tensor"))


def _move_squeeze_after(network: Network, squeeze: Layer, consumer: Layer) -> Layer:
    network.set_input(consumer, consumer.inputs.index(squeeze.out), squeeze.data)
    out = consumer.out
    unsqueezed = Tensor(f"{consumer.name}_out_tensor", out.source, out.elem_type)
    network.remove(squeeze)
    network.set_output(consumer, unsqueezed)
    after = create_shuffle(f"copied_squeeze_after_{consumer.name}", rank_after(consumer.rank))
    after.shuffling.after_matmul = after.shuffling.is_pushed_down = True
    after.shuffling.reorders_values = squeeze.shuffling.reorders_values
    after.shuffling.perm = squeeze.shuffling.perm
    return network.add(after, [unsqueezed], [out])
