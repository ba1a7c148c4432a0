import onnx
import pytest

from qdqtool.builders.compiler_process import is_installed
from tools.fuzz.driver import Answer, Lab, run_seeds
from tools.fuzz.grammar import network
from tools.fuzz.net import Net
from tools.fuzz.shrink import shrink, shrink_answer

needs_compiler = pytest.mark.skipif(
    not is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed"
)


@pytest.mark.slow
@needs_compiler
def test_fuzz_twelve_networks_agree() -> None:
    with Lab() as lab:
        answers = dict(run_seeds(iter(range(700_000, 700_012)), network, lab))
    assert not {seed: a.wrong for seed, a in answers.items() if a.wrong}
    assert sum(a.convolutions for a in answers.values()) > 24
    assert sum(a.absent for a in answers.values()) < 4


def test_fuzz_networks_are_valid_and_reproducible() -> None:
    operators: set[str] = set()
    for seed in (*range(45), 86):
        model = network(seed)
        onnx.checker.check_model(model, full_check=True)
        assert seed % 4 or model.SerializeToString() == network(seed).SerializeToString()
        operators.update(n.op_type for n in model.graph.node)
    # The operators of users' networks are in the grammar.
    assert {
        "Conv",
        "ConvTranspose",
        "Gemm",
        "MatMul",
        "Add",
        "Concat",
        "Split",
        "Slice",
        "MaxPool",
        "Resize",
        "Sigmoid",
        "Relu",
        "HardSwish",
        "LeakyRelu",
        "Clip",
        "BatchNormalization",
        "Softmax",
        "Transpose",
        "Reshape",
        "Pad",
        "GlobalAveragePool",
        "LayerNormalization",
        "Erf",
        "QuantizeLinear",
        "DequantizeLinear",
        "Constant",
    } <= operators


def _deep() -> onnx.ModelProto:
    net = Net()
    x = net.input((1, 4, 8, 8))
    for _ in range(6):
        x = net.op("Relu", net.conv(net.qdq(x), 4))
    y = net.op("Sigmoid", net.op("Tanh", x))
    return net.model(net.op("Add", x, y), y)


def test_fuzz_shrink_keeps_cause_and_kind() -> None:
    small = shrink(_deep(), lambda model: any(n.op_type == "Tanh" for n in model.graph.node))
    assert [n.op_type for n in small.graph.node] == ["Tanh"]
    assert len(small.graph.output) == 1 and not small.graph.initializer

    def answer(model: onnx.ModelProto) -> Answer:
        kinds = [n.op_type for n in model.graph.node]
        if kinds.count("Conv") >= 2:
            return Answer(2, [("conv", "INT8", "FP32 writing FP32")])
        return Answer(1, [("conv", "FP32", "INT8 writing FP32")]) if "Conv" in kinds else Answer(1)

    small = shrink_answer(_deep(), answer)
    assert [n.op_type for n in small.graph.node].count("Conv") == 2
