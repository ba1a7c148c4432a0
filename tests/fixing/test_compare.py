import numpy as np
import onnx
import onnx.parser
import pytest

from qdqtool.fixing.api import fix
from qdqtool.fixing.detections import DetectionVerdict
from qdqtool.fixing.judge import OutputJudge
from qdqtool.fixing.outputs import OutputNoise, is_growth_permitted
from qdqtool.fixing.runner import (
    ModelRunner,
    RunError,
    RunLimitError,
    cut_runnable_part,
    draw_random_inputs,
)
from qdqtool.fixing.site import FixCriteria
from qdqtool.ir.graph import Model
from qdqtool.patterns.rewrites import remove_quantizers
from qdqtool.patterns.view import View
from qdqtool.runtime import sessions
from qdqtool.runtime.run_cost import estimate_run_cost
from qdqtool.util import limits
from qdqtool.util.notes import Note
from tests.findings.test_causes import residual
from tests.trt.builder import Graph


def pair_model(scale=0.1):
    g = Graph()
    return g.model(g.pair(g.input(1, 4, 8, 8), "p", scale))


def test_runner_computes_float_outputs(g: Graph):
    proto = remove_quantizers(Model(g.model(g.pair(g.input(1, 4, 8, 8), "p", 0.1), "p.Q:0"))).proto
    assert {n.op_type for n in proto.graph.node} == {"QuantizeLinear", "Identity"}
    values = np.random.default_rng(0).normal(0, 1, (1, 4, 8, 8)).astype(np.float32)
    found = ModelRunner().run(proto, {"x": values})
    assert np.array_equal(found["p.DQ:0"], values)
    assert np.array_equal(found["p.Q:0"], np.clip(np.rint(values / np.float32(0.1)), -128, 127))


def test_body_of_a_network_ends_with_its_last_convolution(g: Graph):
    model = Model(g.model(g.op("Softmax", g.conv(g.input(1, 16, 8, 8), "c", 16), "soft", axis=1)))
    proto, cut = cut_runnable_part(model, body=True)
    assert cut == ["soft"] and [o.name for o in proto.graph.output] == ["c:0"]


@pytest.mark.parametrize(
    ("after", "is_accepted"),
    [
        (OutputNoise({"a": 1.0, "b": 0.012}, True), True),
        (OutputNoise({"a": 0.5, "b": 0.5}, True), False),
        (OutputNoise({"a": 0.5, "b": 0.0}, False), False),
    ],
)
def test_error_of_every_output_may_grow_by_the_factor(
    after: OutputNoise, is_accepted: bool
) -> None:
    assert is_growth_permitted(OutputNoise({"a": 1.0, "b": 0.01}, True), after, 1.3) is is_accepted


def unknown_type() -> onnx.ModelProto:
    proto = pair_model(0.02)
    proto.graph.input[0].type.tensor_type.elem_type = 99
    return proto


def too_many_dimensions() -> onnx.ModelProto:
    """Return a model whose input has 65 dimensions: numpy has 64."""
    proto = pair_model(0.02)
    del proto.graph.value_info[:], proto.graph.output[:]
    shape = proto.graph.input[0].type.tensor_type.shape
    shape.dim.extend([onnx.TensorShapeProto.Dimension(dim_value=1)] * (65 - len(shape.dim)))
    return proto


@pytest.mark.parametrize(
    ("proto", "code"),
    [(unknown_type(), "unknown-input-type"), (too_many_dimensions(), "unknown-input-shape")],
)
def test_random_inputs_need_type_and_shape(proto: onnx.ModelProto, code: str) -> None:
    with pytest.raises(RunError, check=lambda error: (error.code, error.node) == (code, "x")):
        draw_random_inputs(Model(proto))


def test_random_inputs_fill_the_first_quantizer(g):
    arrays = draw_random_inputs(Model(pair_model(0.02)))
    assert arrays["x"].shape == (1, 4, 8, 8) and arrays["x"].dtype == np.float32
    assert 0.8 * 127 * 0.02 < arrays["x"].max() <= 127 * 0.02
    assert np.array_equal(arrays["x"], draw_random_inputs(Model(pair_model(0.02)))["x"])
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float x) => (float y) {y = Relu(x)}'
    )
    assert draw_random_inputs(Model(proto))["x"].shape == ()
    g.input(1, 3, 8, 8)
    shape = g.inputs[0].type.tensor_type.shape
    shape.dim[0].dim_param, shape.dim[2].dim_param = "batch", "h"
    assert draw_random_inputs(Model(g.model(g.relu("x", "r"))))["x"].shape == (1, 3, 256, 8)


@pytest.mark.parametrize("where", ["behind the last convolution", "everywhere"])
def test_overflowing_float_network_is_not_compared(where):
    """The comparison uses the outputs of the last convolutions, if they are finite."""
    proto = residual("float")
    if where == "everywhere":
        fixed = fix(proto, "trt8.5", inputs={"x": np.full((1, 16, 16, 16), 3e38, np.float32)})
        assert not fixed.applied and fixed.refused[0].why_not.values["cause"] == "output-not-finite"
        return
    last = proto.graph.output[0].name
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(3e38), "huge"))
    proto.graph.node.extend(
        onnx.helper.make_node("Mul", [source, "huge"], [name], name)
        for name, source in {"big0": last, "big1": "big0"}.items()
    )
    proto.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("big1", 1, None))
    fixed = fix(proto, "trt8.5")
    assert [c.code for c in fixed.applied] == ["SKIP-FLOAT"]
    (note,) = (n for n in fixed.notes if n.code == "compared-in-body")
    assert note.values["cause"] == "output-not-finite"


@pytest.mark.parametrize("shape", [["n", 64, "h", "w"], [1, 64, 1, 1], [1, 64, 1024, 1024]])
def test_run_cost_depends_on_inputs_only(shape: list[object]) -> None:
    """The four outputs take 256 MB each, whatever shapes the file states."""
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Conv", ["x", "w"], [f"y{k}"]) for k in range(4)],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, ["n", 1, "h", "w"])],
        [onnx.helper.make_tensor_value_info(f"y{k}", 1, shape) for k in range(4)],
        [onnx.numpy_helper.from_array(np.ones((64, 1, 1, 1), np.float32), "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    with pytest.raises(RunLimitError, check=lambda error: error.code == "memory-limit"):
        ModelRunner().run(model, {"x": np.zeros((1, 1, 1024, 1024), np.float32)})


@pytest.mark.parametrize("ir", [8, 10, 11, 14, 99])
def test_runner_accepts_newer_ir_versions(ir: int) -> None:
    model = pair_model()
    model.ir_version = ir
    x = np.random.default_rng(0).normal(0, 1, (1, 4, 8, 8)).astype(np.float32)
    np.testing.assert_allclose(ModelRunner().run(model, {"x": x})["p.DQ:0"], x, atol=0.05)
    assert model.ir_version == ir


@pytest.mark.parametrize(
    "kind",
    [
        "INT4",
        "UINT4",
        "BFLOAT16",
        "FLOAT8E4M3FN",
        "FLOAT8E5M2",
        "FLOAT4E2M1",
        "COMPLEX64",
    ],
)
def test_fix_accepts_input_types_that_onnxruntime_lacks(kind: str) -> None:
    """The comparison uses the outputs of the last convolutions, and a note says so."""
    model = residual("float")
    more = onnx.helper.make_tensor_value_info("more", getattr(onnx.TensorProto, kind), [1, 4])
    model.graph.input.append(more)
    model.graph.node.append(onnx.helper.make_node("Cast", ["more"], ["less"], to=1))
    model.graph.output.append(onnx.helper.make_tensor_value_info("less", 1, [1, 4]))
    fixed = fix(model, "trt8.5")
    onnx.checker.check_model(fixed.proto)
    assert len(fixed.applied) == 1 and "compared-in-body" in {n.code for n in fixed.notes}
    assert fixed.proto.graph.output[-1].name == "less"


@pytest.fixture
def convolution_run(g: Graph) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    y = g.conv(g.input(1, 8, 20, 20), "c", 16, scale=None, weights="float")
    return g.model(g.relu(y, "y")), {"x": np.zeros((1, 8, 20, 20), np.float32)}


@pytest.mark.parametrize(
    ("limit", "attribute", "code"),
    [("SESSION_WORK", "operations", "work-limit"), ("SESSION_BYTES", "peak_bytes", "memory-limit")],
)
def test_runner_refuses_run_above_limit(
    limit: str, attribute: str, code: str, convolution_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = convolution_run
    monkeypatch.setattr(limits, limit, getattr(estimate_run_cost(model, {}), attribute) - 1)
    with pytest.raises(RunLimitError, check=lambda error: error.code == code):
        ModelRunner().run(model, x)
    assert ModelRunner(2.0).run(model, x)["y:0"].shape == (1, 16, 20, 20)


@pytest.mark.parametrize(("effort", "runs"), [(1.0, 2), (2.5, 5)])
def test_runner_stops_when_work_is_used_up(
    effort: float, runs: int, convolution_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = convolution_run
    one = estimate_run_cost(model, {}).operations + limits.SESSION_RUN
    monkeypatch.setattr(limits, "SESSION_WORK_ALL", 2 * (one + 10**6))
    runner = ModelRunner(effort)
    for _ in range(runs):
        runner.run(model, x)
    with pytest.raises(RunLimitError, check=lambda error: error.code == "work-used-up"):
        runner.run(model, x)


@pytest.mark.parametrize(("zero", "integer"), [(0, np.uint8), (-128, np.int8)])
def test_range_from_zero_is_a_relu_of_the_float_network(zero: int, integer: type) -> None:
    """onnxruntime removes a Relu before a quantizer whose range begins at 0."""

    def chain(quantized: bool) -> onnx.ModelProto:
        g = Graph()
        y = g.conv(g.input(1, 16, 8, 8), "c", 16, scale=None)
        y = g.pair(y, "p", 0.05, zero=zero, integer=integer) if quantized else g.relu(y, "r")
        return g.model(g.conv(y, "d", 16, scale=None))

    x = {"x": np.random.default_rng(1).normal(0, 1, (1, 16, 8, 8)).astype(np.float32)}
    proto, runner = chain(quantized=True), ModelRunner()
    actual, expected = (runner.run(p, x)["d:0"] for p in (proto, chain(quantized=False)))
    error = np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))
    fixed = fix(proto, "trt10", inputs=x)
    assert fixed.applied and fixed.noise_before == pytest.approx(error, rel=1e-4) and error < 0.1
    assert "weak-comparison" not in {n.code for n in fixed.notes}


def test_factor_limits_all_changes_of_a_step_together() -> None:
    """Each change alone raises the error by less than the factor, both together by more."""
    models = [Model(pair_model(scale)) for scale in (0.1, 0.14, 0.18)]
    x = np.random.default_rng(0).uniform(-1, 1, (1, 4, 8, 8)).astype(np.float32)
    errors = []
    for model in models:
        (output,) = ModelRunner().run(model.proto, {"x": x}).values()
        errors.append(np.sqrt(np.mean((output - x) ** 2) / np.mean(x**2)))
    criteria = FixCriteria((), noise_factor=1.5)
    assert errors[2] / errors[1] < 1.5 < errors[2] / errors[0]
    judge = OutputJudge(models[0], [{"x": x}], 1.0, [])
    assert judge.accept_if_close(models[0], models[1], criteria, fewer_errors=False) is None
    refusal = judge.accept_if_close(models[1], models[2], criteria, fewer_errors=False)
    assert refusal.code == "distance-grows" and all(f"{error:.2%}" in refusal for error in errors)
    assert f"limit is {1.5 * errors[0]:.2%} for all changes of this kind together" in refusal
    judge.start_step()
    assert judge.accept_if_close(models[1], models[2], criteria, fewer_errors=False) is None


def test_places_of_hidden_findings_count_by_their_changes() -> None:
    """Nonzero zero points hide the finding that both inputs of the Add are quantized."""
    proto = residual("own", conv_side=True)
    for tensor in proto.graph.initializer:
        if tensor.name.endswith(".zero") and "w" not in tensor.name:
            zeros = onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(zeros + np.int8(3), tensor.name))
    fixed = fix(proto, "trt8.5")
    assert "ADD-BOTH" not in {f.code for f in fixed.before.findings}
    assert [c.code for c in fixed.applied].count("ADD-BOTH") == 1
    assert fixed.fixed_places()["ADD-BOTH"] == 1


def chain_of_silus(blocks: int, scales: tuple[float, float] = (0.05, 0.06)) -> onnx.ModelProto:
    """Return a network with a Q/DQ pair before and in each SiLU.

    Two convolutions read the last SiLU.
    """
    g = Graph()
    x = g.input(1, 16, 16, 16)
    for block in range(blocks):
        inner = g.pair(g.conv(x, f"c{block}", 16), f"inner{block}", 0.1)
        gate = g.pair(g.op("Sigmoid", inner, f"sig{block}"), f"gate{block}", 0.008)
        x = g.op("Mul", [inner, gate], f"mul{block}")
        g.channels[x] = 16
    ends = zip(("a", "b"), scales, strict=True)
    return g.model(*(g.conv(x, name, 16, scale=scale) for name, scale in ends))


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("only", [[], ["SILU-INNER-Q"]])
def test_change_that_outputs_refused_is_tried_again_after_other_fixes(
    only: list[str], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outputs refuse to fix SILU-INNER-Q while the scales after a SiLU differ.

    The places are tried together until no other fix is left, and only then separately.
    """
    proto = chain_of_silus(blocks)
    accept, attempts = OutputJudge.accept_if_close, []

    def refuse_first(
        judge: OutputJudge, current: Model, candidate: Model, criteria: FixCriteria, errors: bool
    ) -> Note | None:
        if "SILU-INNER-Q" not in criteria.codes:
            return accept(judge, current, candidate, criteria, errors)
        attempts.append(candidate)
        view = View(candidate)
        first = {view.params(q).scale[0] for q in candidate.nodes if q.name in ("a.in.Q", "b.in.Q")}
        if len(first) > 1:
            return Note("the error would grow", code="distance-grows")
        return accept(judge, current, candidate, criteria, errors)

    monkeypatch.setattr(OutputJudge, "accept_if_close", refuse_first)
    fixed = fix(proto, only=only)
    applied, refused = {a.code for a in fixed.applied}, {a.code for a in fixed.refused}
    if only:  # nothing else changes the outputs
        assert (applied, refused) == (set(), {"SILU-INNER-Q"})
        assert not {a.why_not.code for a in fixed.refused} & {"not-separated", "not-separated-as"}
        assert len(fixed.refused) == blocks and len(attempts) < 12
    else:
        assert len(applied) == 2 and "SILU-INNER-Q" in applied and not refused
        assert len(attempts) <= 2


def test_step_has_one_note_on_detections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The note compares the last changes that were kept with the start of the step."""
    agreements = iter((0.99, 0.98, 0.97, 0.96))

    def refuse_all_at_once(
        judge: OutputJudge, current: Model, candidate: Model, criteria: FixCriteria, errors: bool
    ) -> Note | None:
        removed = sum(n.op == "QuantizeLinear" for n in current.nodes) - sum(
            n.op == "QuantizeLinear" for n in candidate.nodes
        )
        if removed > 4:
            return Note("the error would grow", code="distance-grows")
        judge.verdict = DetectionVerdict(1.0, next(agreements), -0.1, 0.1, 8, 80)
        return None

    monkeypatch.setattr(OutputJudge, "accept_if_close", refuse_all_at_once)
    fixed = fix(chain_of_silus(3, (0.05, 0.05)), only=["SILU-INNER-Q"])
    assert {a.code for a in fixed.applied} == {"SILU-INNER-Q"} and not fixed.refused
    notes = [n for n in fixed.notes if n.code == "detections-decided"]
    assert [n.values["after"] for n in notes] == [0.97]


def test_samples_share_one_session(
    convolution_run: tuple[onnx.ModelProto, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    proto, inputs = convolution_run
    model, open_session, opened = Model(proto), sessions.open_session, []

    def count(*args, **options):
        opened.append(1)
        return open_session(*args, **options)

    monkeypatch.setattr(sessions, "open_session", count)
    counts = []
    for samples in (1, 4):
        opened.clear()
        OutputJudge(model, [inputs] * samples, 1.0, []).run_reference()
        counts.append(len(opened))
    assert counts[0] == counts[1] > 0
    assert len(ModelRunner(samples=2).run_samples(proto, [inputs] * 2)) == 2


def test_refusal_at_a_removed_node_is_dropped(monkeypatch: pytest.MonkeyPatch, g: Graph) -> None:
    """The outputs refuse to change the zero point of a quantizer that another fix removes."""
    inner = g.pair(g.conv(g.input(1, 16, 16, 16), "c0", 16), "inner", 0.1, zero=3)
    out = g.op("Mul", [inner, g.op("Sigmoid", inner, "sig")], "mul")
    g.channels[out] = 16
    proto = g.model(g.conv(out, "c1", 16))
    accept = OutputJudge.accept_if_close

    def refuse_zero_points(
        judge: OutputJudge, current: Model, candidate: Model, criteria: FixCriteria, errors: bool
    ) -> Note | None:
        if "ZP-NONZERO" in criteria.codes:
            return Note("the error would grow", code="distance-grows")
        return accept(judge, current, candidate, criteria, errors)

    monkeypatch.setattr(OutputJudge, "accept_if_close", refuse_zero_points)
    fixed = fix(proto)
    assert [a.code for a in fixed.applied] == ["SILU-INNER-Q"]
    assert not fixed.refused and "inner.Q" not in {n.name for n in fixed.proto.graph.node}
