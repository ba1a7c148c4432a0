"""`make bench` runs every script that needs no arguments and no missing package.

`run.py` lists the other scripts.
"""

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

from calibration.session import TensorFetcher, open_session
from qdqtool.accuracy.detections import DetectionMatches, Detections, decode_detections
from qdqtool.ir.graph import Model
from tests.calibration.nets import conv_net
from tests.trt.builder import Graph

HERE = Path(__file__).parents[1] / "benchmarks"
RUN: dict[str, Any] = runpy.run_path(str(HERE / "run.py"))
NAMES = sorted(RUN["benchmarks"]())
SCRIPTS = [*HERE.glob("*.py"), *HERE.parent.glob("tools/**/*.py")]


@pytest.fixture(autouse=True)
def _make_scripts_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def is_required_argument(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(".add_argument"):
        return False
    options = {k.arg: ast.unparse(k.value) for k in node.keywords}
    is_option = ast.unparse(node.args[0]).startswith("'-")
    return options.get("required") == "True" or not (is_option or {"nargs", "default"} & {*options})


def has_parameters(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "main" and bool(node.args.args)


@pytest.mark.parametrize("name", sorted({*NAMES, *RUN["DATA"]}))
def test_run_lists_scripts_that_need_arguments(name: str) -> None:
    nodes = ast.walk(ast.parse((HERE / f"{name}.py").read_text("utf-8")))
    assert (name in RUN["DATA"]) == any(is_required_argument(n) or has_parameters(n) for n in nodes)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_imports_of_a_script_exist(path: Path) -> None:
    """Scripts that need data or packages run rarely, so that a moved name would go unnoticed."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(
            ("qdqtool", "calibration", "tests.", "tools.", "benchmarks.")
        ):
            for package in {"torch", "ultralytics"} if "qat" in str(node.module) else ():
                pytest.importorskip(package)
            module = import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}"), name


def test_paired_difference_has_an_interval() -> None:
    paired = runpy.run_path(str(HERE / "common.py"))["paired"]
    values = [float(v) for v in np.random.default_rng(0).normal(size=40)]
    assert paired([(values, [v - 0.5 for v in values])], np.mean) == pytest.approx((0.5, 0.5, 0.5))
    halves = [(values, values), (values, [v - 1.0 for v in values])]
    assert paired(halves, np.mean) == pytest.approx((0.5, 0.5, 0.5))


def test_publish_writes_a_table_between_its_marks(tmp_path: Path) -> None:
    common, page = runpy.run_path(str(HERE / "common.py")), tmp_path / "page.md"
    page.write_text("before\n<!-- a: written by x -->\nold\n\nold\n<!-- end of a -->\nafter\n")
    common["publish"]("a", common["table"](("x", "y"), [(1, "\\1")]), page)
    assert page.read_text() == (
        "before\n<!-- a: written by x -->\n| x | y |\n| --- | --- |\n| 1 | \\1 |\n"
        "<!-- end of a -->\nafter\n"
    )
    with pytest.raises(SystemExit, match=r"page\.md.*'<!-- b:"):
        common["publish"]("b", "", page)


@pytest.mark.parametrize(
    ("script", "absent", "expected"),
    [
        ("qat_models", "torch", "torch"),
        ("attention", "torch", "torch"),
        ("trust", "torch", ""),
        ("qat_models", "torchvision", "torchvision"),
        ("timing_docs", "matplotlib", "matplotlib"),
        ("accuracy", "", RUN["DATA"]["accuracy"]),
    ],
)
def test_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, script: str, absent: str, expected: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == absent else name)
    assert RUN["missing"](script) == expected


@pytest.mark.parametrize(
    ("times", "low", "value", "high", "sure"),
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
def test_ratio_is_between_order_statistics_of_the_turns(
    times: list[float], low: float, value: float, high: float, sure: float
) -> None:
    ratio = runpy.run_path(str(HERE / "speed.py"))["ratio"](
        [2 * x for x in times], [2.0] * len(times)
    )
    assert (ratio.low, ratio.value, ratio.high) == (low, value, high)
    assert ratio.sure == pytest.approx(sure)


def prepare_peer(folder: Path, script: str) -> tuple[Any, Any, Any]:
    """Return benchmarks/accuracy.py, a split, and options whose interpreter is a shell script."""
    accuracy = runpy.run_path(str(HERE / "accuracy.py"))
    onnx.save(conv_net((1, 3, 64, 64)), model := folder / "net.onnx")
    (peer := folder / "peer").write_text(f"#!/bin/sh\n{script}\n")
    peer.chmod(0o755)
    split = accuracy["Split"]("a", model, folder / "images", folder / "others")
    return accuracy, split, SimpleNamespace(work=folder, modelopt=peer)


def test_peer_model_is_cached_by_model_and_images(tmp_path: Path) -> None:
    calls, images = tmp_path / "calls", np.zeros((2, 3, 64, 64), np.float32)
    accuracy, split, options = prepare_peer(tmp_path, f'echo . >> "{calls}"\ncp "$3" "$7"')
    model = split.model.read_bytes()
    for calibration, runs in ((images, 1), (images, 1), (images[:1], 2), (images + 1, 3)):
        split.made_from = accuracy["common"].digest(model, calibration)
        assert accuracy["quantized"](split, "ModelOpt entropy", calibration, options) == model
        assert calls.read_text().count(".") == runs


def test_failure_of_a_peer_has_the_last_line_of_its_errors(tmp_path: Path) -> None:
    script = "echo Traceback >&2\necho No module x >&2\nexit 1"
    accuracy, split, options = prepare_peer(tmp_path, script)
    with pytest.raises(RuntimeError, match=r"^No module x$"):
        accuracy["quantized"](split, "ModelOpt max", np.zeros((1, 3, 64, 64)), options)


def test_work_folder_belongs_to_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_work_folder = runpy.run_path(str(HERE / "common.py"))["open_work_folder"]
    folder: Path = open_work_folder(tmp_path)
    (folder / "a.detections.npz").touch()
    assert open_work_folder(tmp_path) == folder
    assert capsys.readouterr().err == f"{folder}: files of earlier runs that are reused: 1\n"
    monkeypatch.setattr("importlib.metadata.version", lambda package: f"{package} 2")
    assert open_work_folder(tmp_path) != folder
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"changed source")
    assert open_work_folder(tmp_path) != folder


def test_table_of_output_errors_has_the_methods_of_insert() -> None:
    script = runpy.run_path(str(HERE / "accuracy.py"))
    errors = {"focus": 0.079, "ModelOpt max": None}
    rows = [script["Result"]("a", m, 60, 0.9, 0.9, output_error=e) for m, e in errors.items()]
    assert script["format_errors"](rows).splitlines()[2:] == ["| a | `focus` | 7.9 % | 0.900 |"]


def test_detections_are_those_of_compare(g: Graph) -> None:
    """Other graph optimizations of onnxruntime round differently."""
    convolution = g.conv(g.input(1, 16, 8, 8), "c", 16, scale=None, weights="float")
    boxes = g.op("Reshape", [convolution, g.const("shape", np.array([1, 16, 64]))], "boxes")
    proto, x = g.model(boxes), np.random.default_rng(0).normal(0, 1, (1, 16, 8, 8))
    run_model = runpy.run_path(str(HERE / "common.py"))["run_model"]
    (detections,) = run_model(proto.SerializeToString(), [x.astype(np.float32)], 1)
    fetcher = TensorFetcher(open_session(Model(proto), [boxes], 1, fold_qdq=False))
    expected = decode_detections(fetcher.run({"x": x.astype(np.float32)})[boxes])
    np.testing.assert_array_equal(detections.scores, expected.scores)


def test_judge_counts_detections_of_the_float_model_above_a_quarter(tmp_path: Path) -> None:
    common, path, g = runpy.run_path(str(HERE / "common.py")), tmp_path / "net.onnx", Graph()
    onnx.save(g.model(g.op("Identity", g.input(1, 5, 2), "boxes")), path)
    anchors = np.array([[[8, 40], [8, 40], [8, 8], [8, 8], [0.9, 0.2]]], np.float32)
    (matches,) = common["judge_of"](path, [anchors], tmp_path, 1)(path.read_bytes())
    assert (len(matches.truth), len(matches.scores), common["pooled"]([matches])) == (1, 2, 1.0)


def test_tables_of_evaluation_images_have_agreements_and_scores() -> None:
    """One of two boxes is found at IoU 0.50 only, so that half of the recall is missing above."""
    script = runpy.run_path(str(HERE / "evaluation_images.py"))
    boxes = Detections(np.zeros((2, 4)), np.array([0.9, 0.3]), np.zeros(2, int))
    hits = np.array([[True] * 10, [True] + [False] * 9])
    matches = DetectionMatches(boxes.scores, hits, boxes.classes, boxes.classes)
    images = script["EvaluationSet"]("photographs", [hits] * 2, [boxes, boxes.filter_by_score(1.0)])
    text = script["format_tables"]([images], [script["summarize"](12, "photographs", [matches])])
    assert f"| 12 | {(1 + 9 * 51 / 101) / 10:.3f} (" in text
    assert "| photographs | 1 of 2 | 50 % | 1.00 | 0.50 |" in text


def test_images_of_calibration_are_excluded_by_their_content() -> None:
    exclude = runpy.run_path(str(HERE / "common.py"))["exclude_images"]
    images = np.arange(9.0, dtype=np.float32).reshape(3, 3, 1, 1)
    np.testing.assert_array_equal(exclude(images, images[1:2].copy()), images[[0, 2]][:, None])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("[[split", "not a list of"),
        ("x = 1", "not a list of"),
        ('[[split]]\nname = "a"\nmodel = "m"', "split 1 has no 'calibration'"),
        (
            '[[split]]\nname = "a"\nmodel = "m"\ncalibration = "c"\nevaluation = "e"',
            "model of split 'a'",
        ),
    ],
)
def test_damaged_list_of_splits_is_refused_in_one_line(
    tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "splits.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit, match=message) as caught:
        runpy.run_path(str(HERE / "common.py"))["read_splits"](
            file, ("model", "calibration", "evaluation")
        )
    assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)
