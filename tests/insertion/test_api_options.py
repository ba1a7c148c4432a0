"""The options of insertion: their defaults, what each does, and what is said of wrong ones."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

import qdqtool
from qdqtool.commands.insert import command
from qdqtool.errors import DataError, ModelError, QdqtoolError
from qdqtool.insertion.calibrate import write_table
from qdqtool.insertion.scales import choose_scale
from tests.insertion.nets import Net, images
from tests.insertion.test_api import one_layer


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"head": "everything"}, QdqtoolError, "`head='everything'`: choose one of"),
        ({"residual": "some"}, QdqtoolError, "`residual='some'`: choose one of"),
        ({"weights": "int4"}, QdqtoolError, "`weights='int4'`: choose one of"),
        ({"high_precision": "bf16"}, QdqtoolError, "`high_precision='bf16'`: choose one of"),
        ({"target": "trt7"}, QdqtoolError, "unknown target 'trt7'"),
        ({"method": "kl"}, QdqtoolError, "`method='kl'`: choose one of"),
        ({"method_for": [("zzz", "max")]}, QdqtoolError, "matches no quantized tensor"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        qdqtool.insert(one_layer(), images(), **options)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_defaults_are_those_of_the_command_line() -> None:
    """As ``qdqtool insert --help`` says them; losses apart, which the command measures on two samples."""
    defaults = {n: p.default for n, p in inspect.signature(qdqtool.insert).parameters.items() if n != "model"}
    assert defaults == {
        "data": None, "method": "focus", "method_for": (), "percentile": 99.99, "max_images": 512, "preprocess": None,
        "size": None, "calib_cache": None, "overwrite_cache": False, "calib_table": None, "target": "trt10",
        "head": "box", "residual": "auto", "attention": "float", "unify": True, "exclude": (), "include": (),
        "exclude_op": (),
        "weights": "float", "high_precision": None, "input_type": "float", "losses": 0, "predict": True,
        "progress": False, "cluster": None, "mixed_cpus": False,
    }  # fmt: skip
    shown = {p.name: p.default for p in command.params if isinstance(p.default, str | float | int)}
    same = {"method", "percentile", "max_images", "head", "residual", "weights", "input_type"}
    assert {n: defaults[n] for n in same} == {n: shown[n] for n in same}


@pytest.mark.parametrize("named", [True, False])
def test_refusals_name_the_file(named: bool, tmp_path: Path) -> None:
    def given(model: onnx.ModelProto) -> onnx.ModelProto | Path:
        onnx.save(model, tmp_path / "m.onnx")
        return tmp_path / "m.onnx" if named else model

    name = str(tmp_path / "m.onnx") if named else "model"
    done = qdqtool.insert(one_layer(), images(), predict=False).model
    with pytest.raises(ModelError) as caught:
        qdqtool.insert(given(done), images())
    assert str(caught.value) == (
        f"{name}: is quantized already (it has Q/DQ or integer operators); give the float model it was made from, or "
        "predict this one"
    )
    net = Net()
    net.output(net.conv("c", net.conv("b", net.conv("a", "x"))))
    with pytest.raises(ModelError) as caught:
        qdqtool.insert(given(net.model()), images(), exclude=["a", "b|c"])
    assert str(caught.value) == f"{name}: nothing to quantize; 2 nodes: excluded by `exclude` b|c"


def test_a_normalization_in_front_of_convolutions_is_folded_and_told() -> None:
    net = Net()
    net.output(net.op("Relu", "r", net.conv("c", net.norm("n", "x"), kernel=1)))
    assert qdqtool.insert(net.model(), images(), predict=False).notes == [
        "1 BatchNormalization nodes were folded into the convolutions behind them"
    ]


def test_powers_are_told_of_what_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def insert(method: str) -> qdqtool.Insertion:
        return qdqtool.insert(one_layer(), images(), method=method, predict=False)

    assert insert("max").calibration["powers"] == {} and insert("mse").calibration["powers"] == {"x": 2.0}
    chosen = lambda *a: (replace(choose_scale(*a)[0], power=2.34567), [])  # noqa: E731
    monkeypatch.setattr("qdqtool.insertion.api.choose_scale", chosen)
    assert insert("mse").calibration["powers"] == {"x": 2.35}


def test_a_table_has_no_samples_to_measure_losses_on(tmp_path: Path) -> None:
    first = qdqtool.insert(one_layer(), images(), predict=False, losses=1)
    assert first.losses is not None and qdqtool.insert(one_layer(), images(), predict=False).losses is None
    write_table(first, tmp_path / "t")
    second = qdqtool.insert(one_layer(), calib_table=tmp_path / "t", losses=1)
    assert second.losses is None and second.calibration == {
        "table": str(tmp_path / "t"), "images": 0, "methods": {"table": 1}, "powers": {},
    }  # fmt: skip


@pytest.mark.parametrize(("target", "weights", "warned"), [
    ("trt8.0", "int8", True), ("trt8.0", "float", False), ("trt10", "int8", False),
])  # fmt: skip
def test_a_target_that_cannot_read_int8_weights_is_warned_of(target: str, weights: str, warned: bool) -> None:
    result = qdqtool.insert(one_layer(), images(), target=target, weights=weights, predict=False)
    told = [f"{target} cannot read int8 weights; use `weights='float'` for it"]
    assert result.warnings[-1:] == told if warned else told[0] not in result.warnings


def test_a_cluster_that_cannot_be_is_refused_before_the_work() -> None:
    with pytest.raises(QdqtoolError, match="cluster"):
        qdqtool.insert("no such file.onnx", images(), cluster="nonsense")


def test_no_data_at_all() -> None:
    with pytest.raises(DataError, match="no calibration data"):
        qdqtool.insert(one_layer())


def test_wrong_shapes_and_names_of_data() -> None:
    with pytest.raises(DataError, match=r"\[1, 3, 8, 8\].*takes"):
        qdqtool.insert(one_layer(), images(2, 3))
    wrong = [{"y": images(1)[0]["x"], "z": images(1)[0]["x"]}]
    with pytest.raises(DataError, match="no array for the model's input 'x'"):
        qdqtool.insert(one_layer(), wrong)
