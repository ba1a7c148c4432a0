"""collect() against every value of the tensors as onnxruntime gives them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import calibration
from calibration.images import Preprocess, open_data
from calibration.partial import input_specs, metadata_size, partial_model
from calibration.runner import collect
from calibration.statistics import TensorStatistics
from qdqtool.errors import DataError, ModelError, QdqtoolError
from qdqtool.modelfile import load
from tests.calibration.nets import conv_net, run_all, write_pictures

NAMES = ["images", "c1", "r2"]


def feeds(count: int, shape: tuple[int, ...] = (1, 3, 16, 16), dtype: str = "float32") -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    return [{"images": rng.random(shape).astype(dtype)} for _ in range(count)]


def assert_same(found: calibration.Statistics, values: dict[str, Any], rel: float = 1e-5) -> None:
    """Fused kernels may differ in the last bits, which can move a value to the next bin but not further."""
    for name, flat in values.items():
        part, direct = found[name], TensorStatistics.of(flat)
        assert part.count == flat.size
        assert part.minimum == pytest.approx(float(flat.min()), rel=rel, abs=1e-6)
        assert part.maximum == pytest.approx(float(flat.max()), rel=rel, abs=1e-6)
        ours, edges = part.linear(64)
        theirs, _ = np.histogram(np.abs(flat), edges)
        assert np.abs(np.cumsum(ours) - np.cumsum(theirs)).max() <= max(0.02 * flat.size, 3), name
        assert part.counter.counts.sum() == direct.counter.counts.sum()


def test_statistics_are_those_of_every_value(tmp_path: Path) -> None:
    write_pictures(tmp_path, 9)
    model = conv_net()
    found = collect(model, tmp_path, NAMES, progress=False)
    samples = [dict(s) for s in open_data(tmp_path, input_specs(load(model)))]
    assert found.images == 9
    assert list(found) == NAMES
    assert_same(found, run_all(model, samples, NAMES))
    assert found.warnings == ["only 9 calibration images; 100 or more give steadier ranges"]


def test_path_bytes_proto_and_index_are_the_same(tmp_path: Path) -> None:
    model = conv_net()
    onnx.save(model, tmp_path / "m.onnx")
    given = [tmp_path / "m.onnx", model.SerializeToString(), model, load(model)]
    found = [collect(g, feeds(3), ["c1"], progress=False)["c1"] for g in given]
    for other in found[1:]:
        assert np.array_equal(found[0].counter.counts, other.counter.counts)


def test_dynamic_shapes_take_samples_of_any_size() -> None:
    model = conv_net(("batch", 3, "height", "width"))
    samples = feeds(2) + feeds(2, (2, 3, 8, 24))
    assert_same(collect(model, samples, NAMES, progress=False), run_all(model, samples, NAMES))


def test_the_size_comes_from_the_models_metadata(tmp_path: Path) -> None:
    write_pictures(tmp_path, 2)
    model = conv_net(("batch", 3, "height", "width"))
    with pytest.raises(DataError, match="size open"):
        collect(model, tmp_path, ["images"], progress=False)
    assert collect(model, tmp_path, ["images"], progress=False, size=(8, 24))["images"].count == 2 * 3 * 8 * 24
    model.metadata_props.append(onnx.StringStringEntryProto(key="imgsz", value="[24, 32]"))
    assert collect(model, tmp_path, ["images"], progress=False)["images"].count == 2 * 3 * 24 * 32


@pytest.mark.parametrize(
    ("text", "size"),
    [("[64, 48]", (64, 48)), ("320", (320, 320)), ("(64, 32)", (64, 32)), ("", None), ("[0, 1]", None), ("x", None)],
)
def test_metadata_size(text: str, size: tuple[int, int] | None) -> None:
    model = conv_net()
    model.metadata_props.append(onnx.StringStringEntryProto(key="imgsz", value=text))
    assert metadata_size(load(model)) == size


def test_float16_models() -> None:
    model = conv_net(dtype=TensorProto.FLOAT16)
    samples = feeds(3, dtype="float16")
    found = collect(model, samples, NAMES, progress=False)
    values = {n: v.astype(np.float32) for n, v in run_all(model, samples, NAMES).items()}
    assert_same(found, values, rel=5e-3)


def test_external_weights(tmp_path: Path) -> None:
    model = conv_net()
    inside = collect(model, feeds(2), ["r2"], progress=False)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    outside = collect(tmp_path / "m.onnx", feeds(2), ["r2"], progress=False)
    assert np.array_equal(inside["r2"].counter.counts, outside["r2"].counter.counts)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match="missing"):
        collect(tmp_path / "m.onnx", feeds(2), ["r2"], progress=False)


def test_external_weights_outside_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    onnx.save(conv_net(), folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    proto = onnx.load(folder / "m.onnx", load_external_data=False)
    (tmp_path / "w.bin").write_bytes((folder / "w.bin").read_bytes())
    for tensor in proto.graph.initializer:
        next(e for e in tensor.external_data if e.key == "location").value = "../w.bin"
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="outside"):
        collect(folder / "m.onnx", feeds(1), ["r2"], progress=False)


def test_only_what_the_tensors_need_is_computed() -> None:
    model = conv_net()
    partial = partial_model(load(model), ["c1"])
    assert [n.name for n in partial.graph.node] == ["conv1", "sigmoid1", "mul1"]
    assert [t.name for t in partial.graph.initializer] == ["w1"]
    assert [o.name for o in partial.graph.output] == ["c1"]


def test_subgraphs_keep_what_they_read_and_unsorted_nodes_are_sorted() -> None:
    inner = [helper.make_node("Mul", ["y", "k"], ["z"])]
    then = helper.make_graph(inner, "then", [], [helper.make_tensor_value_info("z", 1, None)])
    otherwise = helper.make_graph(
        [helper.make_node("Identity", ["y"], ["w"])], "else", [], [helper.make_tensor_value_info("w", 1, None)]
    )
    nodes = [
        helper.make_node("If", ["c"], ["out"], then_branch=then, else_branch=otherwise),
        helper.make_node("Relu", ["x"], ["y"]),
    ]
    weights = [numpy_helper.from_array(np.array(True), "c"), numpy_helper.from_array(np.array([3], np.float32), "k")]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [1, 4])],
        [helper.make_tensor_value_info("out", 1, None)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    found = collect(model, [{"x": np.array([[-1, 2, 0, 5]], np.float32)}], ["out", "y"], progress=False)
    assert found["out"].maximum == 15.0 and found["y"].maximum == 5.0 and found["y"].minimum == 0.0


def test_a_tensor_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelError, match=r"no tensor 'c11'; did you mean 'c1'\?"):
        collect(conv_net(), feeds(1), ["c11"], progress=False)
    with pytest.raises(ModelError, match="'w1' is a constant"):
        collect(conv_net(), feeds(1), ["w1"], progress=False)


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    for index in range(3):
        (tmp_path / f"{index}.jpg").write_text("no picture")
    with pytest.raises(DataError, match=r"none of the 3 images could be read; the first, 0\.jpg: .*identify"):
        collect(conv_net(), tmp_path, ["c1"], progress=False)
    with pytest.raises(DataError, match="holds no samples"):
        collect(conv_net(), [], ["c1"], progress=False)


def test_wrong_shapes_are_an_error() -> None:
    with pytest.raises(DataError, match=r"is \[1, 3, 8, 8\], the model's input 'images' takes \[1, 3, 16, 16\]"):
        collect(conv_net(), feeds(1, (1, 3, 8, 8)), ["c1"], progress=False)


def test_a_model_that_onnxruntime_refuses_is_an_error() -> None:
    model = conv_net()
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(ModelError, match="onnxruntime cannot run it") as caught:
        collect(model, feeds(1), ["c1"], progress=False)
    assert "\n" not in str(caught.value)


def test_nan_and_infinity_are_counted_and_warned_about() -> None:
    samples = feeds(4)
    samples[1]["images"][0, 0, 5, 5] = np.nan
    samples[2]["images"][0, 1, 2, 3] = np.inf
    found = collect(conv_net(), samples, ["images", "c1"], progress=False)
    values = run_all(conv_net(), samples, ["images", "c1"])
    for name in ("images", "c1"):
        finite = np.isfinite(values[name])
        assert found[name].nonfinite == (~finite).sum() > 0
        assert found[name].count == finite.sum()
    assert any(w.startswith("tensor 'c1': ") and "NaN or infinite" in w for w in found.warnings)
    assert "2 of 4 samples hold NaN or infinities" in found.warnings


def test_a_tensor_that_is_never_finite_is_an_error() -> None:
    model = conv_net()
    weight = numpy_helper.to_array(model.graph.initializer[1]) * np.float32(np.nan)
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(weight, "w2"))
    with pytest.raises(DataError, match="tensor 'r2' is NaN or infinite for every input"):
        collect(model, feeds(2), ["c1", "r2"], progress=False)


def test_an_iterator_is_enough_and_memory_holds_one_sample_at_a_time() -> None:
    alive: list[int] = []

    def generate() -> Any:
        for feed in feeds(20):
            alive.append(1)
            yield feed

    found = collect(conv_net(), generate(), ["c1"], progress=False, max_images=6)
    assert found.images == 6 and len(alive) <= 7
    assert found.fingerprint == ""


def test_a_fixed_batch_counts_images(tmp_path: Path) -> None:
    write_pictures(tmp_path, 5)
    found = collect(conv_net((4, 3, 16, 16)), tmp_path, ["images"], progress=False)
    assert found.images == 5
    assert found["images"].count == 8 * 3 * 16 * 16


def test_an_error_in_a_worker_reaches_the_caller_and_no_thread_stays() -> None:
    def generate() -> Any:
        yield from feeds(2)
        raise QdqtoolError("the camera is gone")

    before = threading.active_count()
    with pytest.raises(QdqtoolError, match="camera"):
        collect(conv_net(), generate(), ["c1"], progress=False)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.daemon and "Worker" in type(thread).__name__:
            thread.join(5)
    assert threading.active_count() <= before


def test_preprocessing_is_passed_on(tmp_path: Path) -> None:
    write_pictures(tmp_path, 2)
    found = collect(conv_net(), tmp_path, ["images"], progress=False, preprocess=Preprocess(scale=1.0))
    assert found["images"].maximum > 200
