"""Private models: nothing of the original's texts and weights is left, and the prediction is the same."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import qdqtool
from qdqtool.extraction.masking import masked
from qdqtool.graph import Model
from qdqtool.qdq import quantizers, read_params
from tests.extraction.networks import SECRET, residual, secretive
from tests.trt.evidence import HOME

YOLO = HOME / "yolo-resnet18-orin-trt8502" / "model.onnx.gz"


@pytest.fixture(scope="module")
def pair() -> tuple[qdqtool.Extraction, qdqtool.Extraction]:
    """The same part, as it is and made private."""
    plain, hidden = (qdqtool.extract(secretive(), outputs=[f"{SECRET}/done"], private=p) for p in (False, True))
    return plain, hidden


def test_no_original_text_is_left(pair: tuple[qdqtool.Extraction, qdqtool.Extraction]) -> None:
    plain, hidden = pair
    assert plain.proto.SerializeToString().count(SECRET.encode()) > 100
    assert SECRET.lower().encode() not in hidden.proto.SerializeToString().lower()
    assert SECRET not in hidden.kept and SECRET not in str(hidden.as_json())


def test_the_prediction_is_the_same(pair: tuple[qdqtool.Extraction, qdqtool.Extraction]) -> None:
    plain, hidden = pair
    assert hidden.private is not None
    names = hidden.private.names
    assert len(set(names.values())) == len(names)
    one, two = plain.prediction, qdqtool.predict(hidden.proto)
    assert [(names[c.name], c.precision, c.inputs, c.output) for c in one.convolutions] == [
        (c.name, c.precision, c.inputs, c.output) for c in two.convolutions]
    assert sorted((f.code, names.get(f.node, "")) for f in one.findings) == sorted(
        (f.code, f.node) for f in two.findings)
    assert one.conversions == two.conversions


def test_the_structure_stays(pair: tuple[qdqtool.Extraction, qdqtool.Extraction]) -> None:
    plain, hidden = pair
    assert hidden.private is not None
    names = hidden.private.names
    for before, after in zip(plain.proto.graph.node, hidden.proto.graph.node, strict=True):
        assert [names.get(t, t) for t in before.input] == list(after.input)
        assert before.op_type == after.op_type or before.op_type.startswith(SECRET)
    for one, two in zip(plain.proto.graph.initializer, hidden.proto.graph.initializer, strict=True):
        assert (one.dims, one.data_type) == (two.dims, two.data_type)


def test_weights_and_scales_are_others(pair: tuple[qdqtool.Extraction, qdqtool.Extraction]) -> None:
    """Equal scales stay equal and different ones different; of each weight next to nothing is as it was."""
    plain, hidden = (Model(e.proto) for e in pair)
    old = [read_params(plain, n).scale for n in quantizers(plain)]
    new = [read_params(hidden, n).scale for n in quantizers(hidden)]
    assert len({a.tobytes() for a in old if a is not None}) == len({a.tobytes() for a in new if a is not None}) > 2
    for a, b in zip(old, new, strict=True):
        assert a is not None and b is not None and not np.any(a == b)
    for i, a in enumerate(old):
        for j in range(i):
            assert (a is not None and np.array_equal(a, old[j])) == np.array_equal(new[i], new[j])  # type: ignore[arg-type]
    weights = [(numpy_helper.to_array(a), numpy_helper.to_array(b))
               for a, b in zip(plain.proto.graph.initializer, hidden.proto.graph.initializer, strict=True)
               if len(a.dims) == 4]
    assert len(weights) > 4
    for before, after in weights:
        assert np.mean(before == after) < 0.01 and abs(np.corrcoef(before.reshape(-1), after.reshape(-1))[0, 1]) < 0.2


def test_weights_fill_the_same_part_of_their_range() -> None:
    plain, hidden = (Model(qdqtool.extract(residual(), node="b0.c1", private=p).proto) for p in (False, True))
    checked = 0
    for one, two in zip(quantizers(plain), quantizers(hidden), strict=True):
        before, after = plain.constant(one.input(0)), hidden.constant(two.input(0))
        if one.op != "QuantizeLinear" or before is None or after is None:
            continue
        shape = (-1, *[1] * (before.ndim - 1))
        scales = [read_params(m, n).scale for m, n in ((plain, one), (hidden, two))]
        assert scales[0] is not None and scales[1] is not None
        low, high = ((v / s.reshape(shape)).reshape(len(v), -1) for v, s in zip((before, after), scales, strict=True))
        np.testing.assert_allclose(low.max(axis=1), high.max(axis=1), rtol=1e-5)
        np.testing.assert_allclose(low.min(axis=1), high.min(axis=1), rtol=1e-5)
        checked += 1
    assert checked


def test_what_counts_up_is_structure() -> None:
    """The DFL's weights, 0 to 15, by which a YOLOv8 head is recognized."""
    random = np.random.default_rng(0)
    weights = random.standard_normal((4, 4)).astype(np.float32)
    bins = np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1)
    graph = onnx.helper.make_graph([], "g", [], [], [numpy_helper.from_array(bins, "bins"),
                                                     numpy_helper.from_array(weights, "weights")])
    proto = onnx.helper.make_model(graph)
    masked(proto, random)
    one, two = map(numpy_helper.to_array, proto.graph.initializer)
    np.testing.assert_array_equal(one, bins)
    assert np.mean(two == weights) < 0.2


@pytest.mark.parametrize("code", ["SKIP-FLOAT", "CONCAT-SCALE", "BN-UNFOLDED"])
def test_a_real_network(code: str) -> None:
    result = qdqtool.extract(str(YOLO), finding=code, private=True)
    whole = onnx.load_from_string(gzip.decompress(YOLO.read_bytes()))
    data = result.proto.SerializeToString()
    names = {n.name for n in whole.graph.node} | {t for n in whole.graph.node for t in (*n.input, *n.output)}
    assert not [n for n in names if len(n) > 4 and n.encode() in data]
    assert code in {f.code for f in qdqtool.predict(result.proto).findings}


def test_external_file_names_go(tmp_path: Path) -> None:
    model = residual()
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location=f"{SECRET}.bin", size_threshold=0)
    result = qdqtool.extract(str(tmp_path / "m.onnx"), finding="SKIP-FLOAT", private=True)
    assert SECRET.encode() not in result.proto.SerializeToString()
    assert all(t.raw_data for t in result.proto.graph.initializer)
