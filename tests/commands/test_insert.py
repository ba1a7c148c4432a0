import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import onnx
import pytest

from qdqtool.demo.images import write_images
from qdqtool.timing.gpus import choose_gpu
from qdqtool.util.text import format_ms
from tests.commands.conftest import Cli, next_commands
from tests.insertion.nets import Net, check, detector
from tests.insertion.test_api import small
from tests.slow import slow_after

# The least that insert can do.
QUICK = ("--losses", "0", "--no-predict", "--method", "max", "--max-images", "1")
SLOW_GPU = "sm=8.9,sms=1,clock=100,bandwidth=1000,l2=10"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("insert")
    onnx.save(detector(), path / "m.onnx")
    onnx.save(small(), path / "small.onnx")
    (path / "images").mkdir()
    write_images(path / "images", 6, 64)
    return path


@pytest.fixture
def folder(files: Path, current_folder: Path) -> Path:
    for path in files.iterdir():
        (current_folder / path.name).symlink_to(path)
    return current_folder


def test_insert_writes_a_valid_model_next_to_the_float_model(folder: Path, cli: Cli) -> None:
    text = cli("insert", "m.onnx", "--calib", "images", "--all")
    assert cli.err == ""
    check(onnx.load("m_qdq.onnx"))
    assert "/model.22/dfl/conv/Conv" in text and "/model.0/conv/_input_quantizer" in text
    assert next_commands(text)[0] == ["predict", "m_qdq.onnx"]
    assert max(map(len, text.splitlines())) <= 80


def test_insert_all_lists_each_scale(folder: Path, cli: Cli) -> None:
    arguments = ["--method", "max", "--target", "trt10", "--losses", "0", "--max-images", "1"]
    tensors = cli.json("insert", "m.onnx", "--calib", "images", *arguments)["quantized"]
    rows = cli("insert", "m.onnx", "--calib", "images", "--all", *arguments).splitlines()
    scales = [float(row.split()[0]) for row in rows if row.split()[1:2] == ["max"]]
    expected = [tensor["scale"] for tensor in tensors if tensor["method"] == "max"]
    assert len(scales) == 24 and min(scales) > 0
    assert sorted(scales) == pytest.approx(sorted(expected), rel=1e-2)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ("--target 8.6", "8.6"),
        ("--target 10.14.1", "10.14.1"),
        ("--target trt11", "trt11"),
        ("--target 10.3 --strongly-typed", "10.3-strongly-typed"),
        ("--strongly-typed", "trt10-strongly-typed"),
    ],
)
def test_insert_next_commands_name_the_target_as_given(
    folder: Path, cli: Cli, options: str, name: str
) -> None:
    """`compare` has no --strongly-typed, so its target expresses this option."""
    text = cli("insert", "small.onnx", "--calib", "images", *options.split(), *QUICK)
    predict, compare = next_commands(text)[:2]
    assert (predict[2:], compare[-2:]) == (options.split(), ["--target", name])


def test_insert_states_that_it_replaces_a_file(folder: Path, cli: Cli) -> None:
    for verb in ("Wrote", "Replaced"):
        text = cli("insert", "small.onnx", "--calib", "images", "-o", "twice.onnx", *QUICK)
        assert f"\n{verb} twice.onnx (" in text


def test_build_commands_name_trtexec_of_a_jetson(folder: Path, cli: Cli) -> None:
    texts = [cli("insert", "small.onnx", "--calib", "images", "--gpu", "Orin Nano 8GB", *QUICK)]
    texts += [cli("predict", "small_qdq.onnx", "--gpu", gpu) for gpu in ("Orin Nano 8GB", "L4")]
    assert ["trtexec, after sudo jetson_clocks" in " ".join(text.split()) for text in texts] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("gpu", "has_dla"),
    [
        ("Orin NX 16GB", True),
        ("sm=8.7,sms=8,clock=918,bandwidth=102", True),
        ("Orin Nano 8GB", False),
        ("L4", False),
    ],
)
def test_insert_prints_a_build_for_dla_unless_the_gpu_has_none(
    folder: Path, cli: Cli, gpu: str, has_dla: bool
) -> None:
    text = cli(
        "insert", "small.onnx", "--calib", "images", "--write-table", "t", "--gpu", gpu, *QUICK
    )
    assert ("--useDLACore" in text, "has no DLA" in text) == (has_dla, not has_dla)


def test_insert_states_why_it_suggests_no_comparison(folder: Path, cli: Cli) -> None:
    """`compare` rejects the model with int8 input, and accepts the model that the text names."""
    insert = ("insert", "small.onnx", "--calib", "images", *QUICK, "--input-type")
    assert "Compare: not possible for an int8 input" in cli(*insert, "int8", "-o", "int8.onnx")
    cli.refuse("compare", "small.onnx", "int8.onnx", "--calib", "images")
    cli(*insert, "float")
    cli("compare", "small.onnx", "small_qdq.onnx", "--calib", "images")


@pytest.fixture
def dynamic_input(folder: Path) -> str:
    """Name of the input of open.onnx, which is small.onnx with a dynamic size and batch."""
    proto = onnx.load("small.onnx")
    for number, dim in enumerate(proto.graph.input[0].type.tensor_type.shape.dim):
        if number != 1:
            dim.Clear()
    del proto.graph.value_info[:]
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(proto, "open.onnx")
    return proto.graph.input[0].name


def test_insert_estimates_all_types_for_the_size(dynamic_input: str, cli: Cli) -> None:
    arguments = ("--calib", "images", "--gpu", "RTX 4090", *QUICK)
    fixed = cli.json("insert", "small.onnx", *arguments)
    dynamic = cli.json("insert", "open.onnx", "--size", "64", *arguments)
    parts = itertools.product(("time", "formats_time"), ("total_ms", "float", "best", "best_fp8"))
    assert all(dynamic[field][part] == fixed[field][part] for field, part in parts)


def test_predict_suggests_a_command_with_the_size(dynamic_input: str, cli: Cli) -> None:
    """`insert` needs the size of a model with dynamic image size and without metadata."""
    for arguments, size in (((), "640x640"), (("--size", "64"), "64x64")):
        command = next_commands(cli("predict", "open.onnx", "--gpu", "T4", *arguments))[0]
        assert command[command.index("--size") + 1] == size
        cli(*command, *QUICK)
    assert "--size" not in cli("predict", "small.onnx", "--gpu", "T4")


def test_predict_estimates_for_the_given_size(dynamic_input: str, cli: Cli) -> None:
    dynamic = cli.json("predict", "open.onnx", "--gpu", "T4", "--size", "64")["time"]
    fixed = cli.json("predict", "small.onnx", "--gpu", "T4")["time"]
    assert (dynamic["total_ms"], dynamic["best"]) == (fixed["total_ms"], fixed["best"])


def test_build_command_has_the_size_of_insert(dynamic_input: str, cli: Cli) -> None:
    """A builder would use 1 for each dynamic dimension.

    `predict` finds the size in the metadata.
    """
    texts = [cli("insert", "open.onnx", "--calib", "images", "--size", "64", *QUICK)]
    texts += [cli("predict", "open_qdq.onnx", *o) for o in ((), ("--gpu", "T4", "--batch", "8"))]
    for text, batch in zip(texts, (1, 1, 8), strict=True):
        assert f" --shapes={dynamic_input}:{batch}x3x64x64 " in text
    assert cli.json("predict", "open_qdq.onnx")["model"]["open_inputs"] == {
        dynamic_input: [-1, 3, 64, 64]
    }


@pytest.mark.parametrize(
    ("model", "options", "gpu"),
    [
        ("small.onnx", ["--target", "rtx1.7"], "Tesla T4"),
        ("small.onnx", ["--target", "10", "--strongly-typed"], "Tesla T4"),
        ("m.onnx", ["--target", "trt10.16"], "L4"),
        ("m.onnx", ["--target", "trt10.16", "--precision", "fp8"], "RTX 4090"),
        ("m.onnx", ["--target", "trt10.16", "--precision", "auto"], SLOW_GPU),
    ],
    ids=["rtx", "typed", "int8", "fp8", "auto"],
)
def test_insert_and_its_next_command_print_the_same_times(
    folder: Path, cli: Cli, model: str, options: list[str], gpu: str
) -> None:
    text = cli("insert", model, "--calib", "images", *options, "--gpu", gpu, *QUICK)
    command = next_commands(text)[0]
    assert command[-2:] == ["--gpu", gpu]
    rows, again = (re.findall(r"(?m)^  .* ms +[\d.]+ - .*", t) for t in (text, cli(*command)))
    assert len(rows) > 1 and rows == again
    assert cli.json(*command)["compute_capabilities"] == [choose_gpu(gpu).cc]


@pytest.mark.parametrize(
    ("options", "is_faster"),
    [
        (["--gpu", "L4"], True),
        # Most layers remain float, and the GPU computes slowly.
        (["--gpu", SLOW_GPU, "--exclude", "/model.([1-9]|1.|22.cv3)"], False),
    ],
)
def test_insert_notes_that_fp32_would_be_faster(
    folder: Path, cli: Cli, options: list[str], is_faster: bool
) -> None:
    insert = ("insert", "m.onnx", "--calib", "images", "--target", "11", *options, *QUICK)
    half, fp32 = (cli.json(*insert, *other) for other in ((), ("--high-precision", "fp32")))
    assert is_faster == (half["time"]["total_ms"] > fp32["time"]["total_ms"])
    text = f"fp32: {format_ms(fp32['time']['total_ms'])} instead of "
    assert any(text in note for note in half["notes"]) == is_faster
    text = " ".join(cli("predict", "m_qdq.onnx", "--target", "11", *options[:2]).split())
    assert ("is slower because insert writes float layers in FP16" in text) == is_faster


OPTIONS = shlex.split(
    r"""--method-for ^images$=max --exclude /model\.1/ --head none --residual none --weights int8
    --target trt10 --high-precision fp16 --write-table t.table --bgr --mean 0.1,0.2,0.3 --std 0.5
    --max-images 4 --resize stretch --no-predict"""
)


def test_insert_options_reach_the_library(folder: Path, cli: Cli) -> None:
    answer = cli.json("insert", "m.onnx", "--calib", "images", "-o", "q.onnx", *OPTIONS)
    assert (answer["prediction"], answer["target"]) == (None, "trt10")
    assert answer["calibration"]["images"] == 4
    assert {q["tensor"]: q["method"] for q in answer["quantized"]}["images"] == "max"
    assert "`" not in answer["skipped"][0]["reason"]  # parameters are named as options
    assert (folder / "t.table").read_text().startswith("TRT-")
    types = {t.data_type for t in onnx.load("q.onnx").graph.initializer}
    assert types >= {onnx.TensorProto.INT8, onnx.TensorProto.FLOAT16}


def test_insert_interrupted_exits_with_130_and_leaves_nothing(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.replace", Mock(side_effect=KeyboardInterrupt))
    names = sorted(folder.iterdir())
    cli.refuse("insert", "small.onnx", "--calib", "images", *QUICK, code=130)
    assert sorted(folder.iterdir()) == names


def test_predict_into_a_closed_pipe_exits_with_0(files: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "qdqtool", "predict", str(files / "small.onnx")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(60) == 0


def test_insert_names_the_float_type_of_the_file(folder: Path, cli: Cli) -> None:
    """TensorRT-RTX writes FP32 from each INT8 convolution, but the float Add of the file is FP16."""
    net = Net(3, 64)
    stem = net.op("Relu", "r0", net.conv("a", "x", 3))
    total = net.op("Relu", "r1", net.op("Add", "add", net.conv("b", stem), stem))
    onnx.save(net.output(net.conv("c", total)).model(), "skip.onnx")
    text = cli(
        *"insert skip.onnx --calib images --target rtx1.7 --residual none --losses 0".split(),
        *"--max-images 1 --method max".split(),
    )
    assert "Kept in FP16" in text and "Kept in FP32" not in text


def test_insert_names_the_dfl_as_fp32(folder: Path, cli: Cli) -> None:
    """All other layers without Q/DQ are FP16 in a strongly typed network."""
    command = "m.onnx --calib images --strongly-typed --losses 0 --max-images 1 --method max"
    text = " ".join(cli("insert", *command.split()).split())
    assert re.search(r"Kept in FP16 last box .* Kept in FP32 DFL, [^:]*: /model.22/dfl/conv", text)
    assert "27 of 31 convolutions in INT8 (6 of them with FP16 output), 3 in FP16, 1 in" in text
    assert "converted to FP16 (except the DFL and other layers after the last conv" in text


@pytest.mark.parametrize(("target", "int8"), [("rtx1.7", 0), ("10", 2)])
def test_insert_predicts_int8_of_the_gpu(folder: Path, cli: Cli, target: str, int8: int) -> None:
    """TensorRT has INT8 on a T4, TensorRT-RTX does not."""
    command = f"insert small.onnx --calib images --losses 0 --gpu T4 --target {target}"
    assert cli.json(*command.split())["prediction"]["int8"] == int8


def test_insert_auto_writes_the_float_model_unchanged(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdqtool.insertion.format_choice.LARGE_ERROR", 0.0)
    arguments = shlex.split(
        "insert small.onnx --calib images --precision auto -o q.onnx --write-table t.cache"
    )
    text = " ".join(cli(*arguments).split())
    assert "the float model is the best choice" in text and "unchanged to q.onnx" in text
    assert onnx.load("q.onnx") == onnx.load("small.onnx")
    data = cli.json(*arguments)
    assert (data["precision"], data["unchanged"], data["quantized"]) == ("fp16", True, [])
    assert data["choice"]["precision"] == "fp16"
    assert not Path("t.cache").exists() and "table" not in data
    assert any("t.cache was not written" in warning for warning in data["warnings"])


def test_insert_auto_prints_the_output_error_of_its_choice(folder: Path, cli: Cli) -> None:
    arguments = ("insert", "small.onnx", "--calib", "images", "--precision", "auto", "-o", "q.onnx")
    choice = cli.json(*arguments)["choice"]
    assert f" of the whole model: {choice['errors'][choice['precision']]:.1%} " in cli(*arguments)


@pytest.mark.parametrize(("precision", "head"), [("int8", "none"), ("int8", "box"), ("fp8", "box")])
def test_insert_names_the_part_that_causes_the_output_error(
    folder: Path, cli: Cli, precision: str, head: str
) -> None:
    command = f"insert m.onnx --calib images -o q.onnx --precision {precision} --head {head}"
    text = cli(*command.split())
    assert f"of the {precision.upper()} activations (weights in FP32), before decoding" in text
    dfl = " Not included: the DFL" if head == "none" else "\n"
    assert f"measured by 'qdqtool compare --calib'.{dfl}" in re.sub("\n {10,}", " ", text)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "precision", slow_after(2, ["int8", "auto", "fp8", "fp8 --strongly-typed"])
)
def test_insert_gpu_has_one_figure_for_each_time(folder: Path, cli: Cli, precision: str) -> None:
    data = cli.json(
        *f"insert m.onnx --calib images --precision {precision} --losses 0 --method max".split(),
        *"--max-images 1 --gpu L4".split(),
    )
    target = ("--target", "trt10-strongly-typed") if "typed" in precision else ()
    later = cli.json("predict", data["output"], "--gpu", "L4", *target)["time"]
    times = {
        "int8": {later["best"]["total_ms"]},
        "fp8": set(),
        "fp16": {later["float"]["total_ms"]},
    }
    own, formats = data["time"], data.get("formats_time")
    if data["precision"] in ("int8", "fp8"):
        times[data["precision"]].add(own["total_ms"])
        times["fp16"].add(own["float"]["total_ms"])
    for name, ms in (data["choice"] or {"ms": {}})["ms"].items():
        times[name].add(ms)
    if formats:
        times["fp16"].add(formats["float"]["total_ms"])
        for name, key in (("int8", "best"), ("fp8", "best_fp8")):
            times[name].add(formats[key]["total_ms"])
            assert own[key] == formats[key]
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys(times, 1)


def test_insert_suggests_tune_with_its_size_and_target(dynamic_input: str, cli: Cli) -> None:
    """The float model is as fast as INT8. `tune` has no --strongly-typed."""
    command = "insert open.onnx --calib images --size 64 --precision auto --gpu".split()
    target = "--target 10.9 --strongly-typed".split()
    (tune,) = (w for w in next_commands(cli(*command, "RTX 5090", *target)) if w[0] == "tune")
    assert tune[tune.index("--size") + 1] == "64x64"
    assert tune[tune.index("--target") + 1] == "10.9-strongly-typed"
