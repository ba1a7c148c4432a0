"""The part of a model that is run, and what is said of models that cannot be."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from calibration.arrays import open_data
from calibration.clustered import Held, shared
from calibration.dataset import InputSpec
from calibration.session import check_tensors, external_folder, input_specs, metadata_size, partial_model
from calibration.statistics import TensorStatistics
from qdqtool.errors import ClusterError, ModelError
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from tests.calibration.nets import conv_net, told_by, write_pictures

value = helper.make_tensor_value_info


def with_inputs(*inputs: onnx.ValueInfoProto, path: str = "") -> Model:
    model = conv_net()
    model.graph.input.extend(inputs)
    return Model(model, path=path)


def test_shapes_and_types_of_inputs() -> None:
    more = [
        value("open", TensorProto.UINT8, ["n", 0, -1, 1, 2]), value("scalar", TensorProto.BOOL, []),
        value("half", TensorProto.FLOAT16, [None]), value("w1", TensorProto.FLOAT, [4, 3, 3, 3]),
    ]  # fmt: skip
    found = input_specs(with_inputs(*more))
    assert found == [
        InputSpec("images", (1, 3, 16, 16)), InputSpec("open", (None, None, None, 1, 2), "uint8"),
        InputSpec("scalar", (), "bool"), InputSpec("half", (None,), "float16"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (value("in", TensorProto.STRING, [1]), "input 'in' holds object, which cannot be fed"),
        (value("in", TensorProto.COMPLEX64, [1]), "input 'in' holds complex64, which cannot be fed"),
        (value("in", TensorProto.FLOAT, None), "input 'in' has no known rank; export the model with shapes"),
        (value("in", 0, [1]), "input 'in' is not a tensor of numbers"),
        (helper.make_tensor_sequence_value_info("in", TensorProto.FLOAT, [1]), "input 'in' is not a tensor of numbers"),
        (onnx.ValueInfoProto(name="in"), "input 'in' is not a tensor of numbers"),
    ],
)
def test_inputs_that_cannot_be_fed(given: onnx.ValueInfoProto, told: str) -> None:
    for path in ("", "a/net.onnx"):
        assert told_by(ModelError, input_specs, with_inputs(given, path=path)) == f"{path or 'model'}: {told}"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("640", (640, 640)), ("[1, 65536]", (1, 65536)), ("[65536, 1]", (65536, 1)), ("[1, 65537]", None),
        ("[65537, 1]", None), ("[0, 5]", None), ("[5, 0]", None), ("[-1, 5]", None), ("[5]", None), ("[5, 6, 7]", None),
        ("[5.5, 6]", None), ('["5", 6]', None), ("0", None), ("(5, 6)", (5, 6)), ("(5, 6, 7)", (5, 6)), ("5x6", (5, 6)),
        ("(5,)", None), ("{}", None), ("null", None), ("[" * 100_000, None), ("-", None),
    ],
)  # fmt: skip
def test_the_size_in_the_metadata(text: str, size: tuple[int, int] | None) -> None:
    model = conv_net()
    assert metadata_size(Model(model)) is None
    model.metadata_props.append(onnx.StringStringEntryProto(key="imgsz", value=text))
    assert metadata_size(Model(model)) == size


def test_tensors_that_cannot_be_asked_for() -> None:
    for path in ("", "a/net.onnx"):
        model = Model(conv_net(), path=path)
        check_tensors(model, ["images", "c1", "out"])
        for name, told in (
            ("w1", "tensor 'w1' is a constant; its range needs no calibration"),
            ("c11", "there is no tensor 'c11'; did you mean 'c1'?"),
            ("imagess", "there is no tensor 'imagess'; did you mean 'images'?"),
            ("quite another", "there is no tensor 'quite another'"),
        ):
            assert told_by(ModelError, check_tensors, model, ["c1", name]) == f"{path or 'model'}: {told}"


def names(items: object) -> list[str]:
    return [i.name for i in items]  # type: ignore[attr-defined]


@pytest.mark.parametrize("ir_version", [3, 4, 9])
def test_what_a_part_takes_with_it(ir_version: int) -> None:
    """Weights are inputs only for readers of IR version 3, which want them there."""
    model = conv_net()
    model.ir_version = ir_version
    model.graph.input.extend([value("w2", TensorProto.FLOAT, [4, 4, 3, 3]),
                              value("w3", TensorProto.FLOAT, [4, 4, 3, 3]),
                              value("unused", TensorProto.FLOAT, [1])])  # fmt: skip
    whole = Model(model)
    part = partial_model(whole, ["r2"])
    assert names(part.graph.node) == ["conv1", "sigmoid1", "mul1", "conv2", "relu2"]
    assert names(part.graph.initializer) == ["w1", "w2"] and names(part.graph.output) == ["r2"]
    assert names(part.graph.input) == ["images"] + ["w2"] * (ir_version < 4)
    assert (part.ir_version, part.opset_import[0].version, part.graph.name) == (ir_version, 17, "net")
    given = [value("c1", TensorProto.FLOAT, [1, 4, 16, 16]), value("a1", TensorProto.FLOAT, [1, 4, 16, 16])]
    later = partial_model(whole, ["r2"], given)
    assert names(later.graph.node) == ["conv2", "relu2"]
    assert names(later.graph.input) == ["w2"] * (ir_version < 4) + ["c1"], "only what is needed is fed"
    assert names(later.graph.initializer) == ["w2"]
    again = partial_model(whole, ["out", "c1"], given[:1])
    assert names(again.graph.node) == ["conv2", "relu2", "conv3"] and names(again.graph.output) == ["out", "c1"]
    fed = partial_model(whole, ["c1"], [value("images", TensorProto.FLOAT, [2, 3, 16, 16])])
    assert names(fed.graph.input) == ["images"] and fed.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2


def test_functions_sparse_weights_and_a_name_go_along() -> None:
    model = conv_net()
    model.graph.name = ""
    model.functions.append(helper.make_function("own", "F", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])],
                                                [helper.make_opsetid("", 17)]))  # fmt: skip
    for name in ("sparse", "unneeded"):
        values = numpy_helper.from_array(np.ones(1, np.float32), name)
        places = numpy_helper.from_array(np.zeros(1, np.int64), f"{name}_at")
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [4]))
    model.graph.node.append(helper.make_node("Add", ["out", "sparse"], ["sum"], "add"))
    part = partial_model(Model(model), ["sum"])
    assert [s.values.name for s in part.graph.sparse_initializer] == ["sparse"]
    assert part.graph.name == "calibration" and names(part.functions) == ["F"]


def test_the_folder_of_external_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(conv_net(), path)
    assert external_folder(load(path)) == "" == external_folder(Model(conv_net()))
    onnx.save(conv_net(), path, save_as_external_data=True, location="w.bin", size_threshold=500)
    proto = onnx.load(path, load_external_data=False)
    assert [t.data_location == TensorProto.EXTERNAL for t in proto.graph.initializer] == [False, True, True]
    assert external_folder(load(path)) == str(tmp_path)
    told = told_by(ModelError, external_folder, Model(proto))
    assert told == "model: tensor 'w2' has its weights in 'w.bin'; give the model's path"
    model = load(path)
    (tmp_path / "w.bin").unlink()
    assert told_by(ModelError, external_folder, model) == f"{path}: weight file 'w.bin' of tensor 'w2' is missing"


@pytest.mark.parametrize(("given", "run"), [(3, 3), (8, 8), (10, 10), (11, 10), (14, 10)])
def test_what_is_run_has_an_ir_version_that_every_onnxruntime_reads(given: int, run: int) -> None:
    model = conv_net()
    model.ir_version = given
    assert partial_model(Model(model), ["out"]).ir_version == run and model.ir_version == given


BINS = 64
ARRAYS = st.lists(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=12), min_size=1, max_size=6
)


def state(part: TensorStatistics | None) -> Any:
    if part is None:
        return None
    counter = part.counter
    return (part.count, part.nonfinite, part.minimum, part.maximum, counter.top, counter.counts.tolist(),
            state(part.focus))


@given(ARRAYS, st.randoms(use_true_random=False), st.booleans())
def test_any_partition_in_any_order_is_the_whole(lists: list[list[float]], random: Any, focused: bool) -> None:
    arrays = [np.array(values, np.float32) for values in lists]
    whole = {"t": TensorStatistics(BINS), "u": TensorStatistics(BINS)}
    packets = []
    for array in arrays:
        parts = {"t": TensorStatistics.of(array, BINS), "u": TensorStatistics.of(array[::2] * 0.5, BINS)}
        whole["t"].add(array)
        whole["u"].add(array[::2] * 0.5)
        if focused and len(array) % 2:
            parts["u"].add_focus([array[:1] * 0.5])
            whole["u"].add_focus([array[:1] * 0.5])
        packets.append(pickle.loads(pickle.dumps(parts)))
    random.shuffle(packets)
    found = {"t": TensorStatistics(BINS), "u": TensorStatistics(BINS)}
    for packet in packets:
        found = {n: part.merge(packet[n]) for n, part in found.items()}
    assert {n: state(p) for n, p in found.items()} == {n: state(p) for n, p in whole.items()}


@pytest.mark.parametrize(("count", "width"), [
    (1, 1), (255, 1), (256, 2), (65535, 2), (65536, 4), ((1 << 32) - 1, 4), (1 << 32, 8), (1 << 40, 8),
])  # fmt: skip
def test_pickled_counts_take_the_fewest_bytes(count: int, width: int) -> None:
    part = TensorStatistics(64)
    part.count = count
    part.counter.counts[[0, 7, 9]] = 1 << 41, count, 1
    found = pickle.loads(pickle.dumps(part))
    assert state(found) == state(part) and found.counter.counts.dtype == np.int64
    *_, first, window = part.counter.__reduce__()[1]
    assert first == 7 and window.nbytes == 3 * width
    assert len(pickle.dumps(TensorStatistics(64))) < 400  # nothing counted


def test_the_same_samples_under_the_same_numbers(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path, 5)
    here = open_data(tmp_path, [InputSpec("images", (2, 3, 16, 16))], max_images=3)
    there = pickle.loads(pickle.dumps(shared(here)))
    assert (len(there), there.batch, list(there.indices)) == (2, 2, [0, 1, 2])
    for one, other in zip(here, there, strict=True):
        assert np.array_equal(one["images"], other["images"])
    held = there.source
    assert isinstance(held, Held) and (held.count(), held.is_images, held.single_rows) == (3, True, True)
    assert [held.name(k) for k in range(3)] == ["picture000.png", "picture002.png", "picture004.png"]
    assert held.settings() == here.source.settings() and held.digest(1) == here.source.digest(2)
    paths[2].write_bytes(paths[1].read_bytes())
    told = told_by(ClusterError, held.load, 1)
    assert told == "picture002.png is another file there; let all machines see the same files"
    paths[2].unlink()
    told = told_by(ClusterError, held.load, 1)
    assert told == "picture002.png cannot be read there; let all machines see the same files"
