"""`make bench` runs what can run: a script that cannot without arguments or optional packages is known to `run.py`."""

import ast
import runpy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from tests.calibration.nets import conv_net

HERE = Path(__file__).parents[1] / "benchmarks"
RUN: dict[str, Any] = runpy.run_path(str(HERE / "run.py"))
NAMES = sorted(RUN["benchmarks"]())


def wants_arguments(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "main" and node.args.args:
            return True
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            name = node.args[0]
            optional = any(k.arg in ("nargs", "default") for k in node.keywords)
            required = any(
                k.arg == "required" and ast.unparse(k.value) == "True" for k in node.keywords
            )
            if required or (
                isinstance(name, ast.Constant)
                and not str(name.value).startswith("-")
                and not optional
            ):
                return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_what_a_script_needs_is_known(name: str) -> None:
    assert (name in RUN["DATA"]) == wants_arguments(
        ast.parse((HERE / f"{name}.py").read_text("utf-8"))
    )


def test_what_scripts_take_from_the_package_is_there() -> None:
    """Scripts that need data or packages run rarely; a name that moved would be missed until then."""
    pytest.importorskip("torch")
    for path in HERE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(
                ("qdqtool", "calibration")
            ):
                if "ultralytics" in str(node.module):
                    pytest.importorskip("ultralytics")
                module = import_module(str(node.module))
                for name in node.names:
                    assert hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}"), (
                        path,
                        name.name,
                    )


def test_differences_and_names() -> None:
    paired = runpy.run_path(str(HERE / "common.py"))["paired"]
    one = [float(v) for v in np.random.default_rng(0).normal(size=40)]
    assert paired([(one, [v - 0.5 for v in one])], np.mean) == pytest.approx((0.5, 0.5, 0.5))
    difference, low, high = paired([(one, one), (one, [v - 1.0 for v in one])], np.mean)
    assert (difference, low, high) == pytest.approx((0.5, 0.5, 0.5))
    assert set(RUN["DATA"]) <= set(NAMES)


def test_tables_are_written_between_their_marks(tmp_path: Path) -> None:
    common, page = runpy.run_path(str(HERE / "common.py")), tmp_path / "page.md"
    page.write_text("before\n<!-- a: written by x -->\nold\n\nold\n<!-- end of a -->\nafter\n")
    common["publish"]("a", common["table"](("x", "y"), [(1, "\\1")]), page)
    assert page.read_text() == (
        "before\n<!-- a: written by x -->\n| x | y |\n| --- | --- |\n| 1 | \\1 |\n"
        "<!-- end of a -->\nafter\n"
    )
    with pytest.raises(SystemExit, match=r"page\.md.*'<!-- b:"):
        common["publish"]("b", "", page)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = RUN["missing"]
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "torch" else object()
    )
    assert missing("qat_models") == "torch"
    assert missing("attention") == "torch" and missing("trust") == ""
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda n: None if n in ("torchvision", "matplotlib") else n
    )
    assert missing("qat_models") == "torchvision" and missing("timing_docs") == "matplotlib"
    assert missing("accuracy") == RUN["DATA"]["accuracy"]


@pytest.mark.parametrize(
    ("ours", "low", "value", "high", "sure"),
    [
        ([3.0, 1.0, 2.0], 1.0, 2.0, 3.0, 0.75),
        ([4.0], 4.0, 4.0, 4.0, 0.0),
        ([5.0, 1.0, 3.0, 2.0, 4.0], 1.0, 3.0, 5.0, 0.9375),
        (
            [float(i) for i in range(1, 10)],
            2.0,
            5.0,
            8.0,
            1 - 20 / 512,
        ),  # of nine, 1 + 9 ways in 512 on each side
    ],
)
def test_a_ratio_lies_between_order_statistics_of_the_turns(
    ours: list[float], low: float, value: float, high: float, sure: float
) -> None:
    found = runpy.run_path(str(HERE / "speed.py"))["ratio"](
        [2 * x for x in ours], [2.0] * len(ours)
    )
    assert (found.low, found.value, found.high) == (low, value, high)
    assert found.sure == pytest.approx(sure)


def test_what_a_peer_made_is_kept_by_the_model_and_the_images_that_it_was_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter is a stand-in: it copies the model and notes that it was asked."""
    monkeypatch.syspath_prepend(str(HERE))
    accuracy = runpy.run_path(str(HERE / "accuracy.py"))
    peer, asked, model = tmp_path / "peer", tmp_path / "asked", tmp_path / "net.onnx"
    peer.write_text(f'#!/bin/sh\necho . >> "{asked}"\ncp "$3" "$7"\n')
    peer.chmod(0o755)
    onnx.save(conv_net((1, 3, 64, 64)), model)
    options = SimpleNamespace(work=tmp_path, modelopt=peer)
    images = np.zeros((2, 3, 64, 64), np.float32)
    split = accuracy["Split"]("a", model, tmp_path / "images", tmp_path / "others")
    for calibration, runs in ((images, 1), (images, 1), (images[:1], 2), (images + 1, 3)):
        split.made_from = accuracy["common"].digest(model.read_bytes(), calibration)
        made = accuracy["quantized"](split, "ModelOpt entropy", calibration, options)
        assert made == model.read_bytes() and asked.read_text().count(".") == runs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("[[split", "no list of"),
        ("x = 1", "no list of"),
        ('[[split]]\nname = "a"\nmodel = "m"', "split 1 has no 'calibration'"),
        (
            '[[split]]\nname = "a"\nmodel = "m"\ncalibration = "c"\nevaluation = "e"',
            "model of split 'a'",
        ),
    ],
)
def test_a_list_of_splits_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, message: str
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    file = tmp_path / "splits.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit, match=message) as caught:
        runpy.run_path(str(HERE / "common.py"))["read_splits"](
            file, ("model", "calibration", "evaluation")
        )
    assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)
