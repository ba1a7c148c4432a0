import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.buildlog.types import Build
from qdqtool.errors import QdqtoolError
from qdqtool.timing.built_engine import find_build_gpu
from tests.calibration.nets import write_pictures
from tests.commands.conftest import Cli
from tests.errors import has
from tests.trt.builder import Graph


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, g = tmp_path_factory.mktemp("effects"), Graph()
    weights = np.random.default_rng(0).normal(0, 0.3, (8, 3, 3, 3)).astype(np.float32)
    x = g.op("Conv", [g.input(1, 3, 32, 32), g.const("w", weights)], "c", kernel_shape=[3, 3])
    onnx.save(g.model(g.op("Relu", x, "r")), folder / "float.onnx")
    (folder / "images").mkdir()
    np.save(folder / "a.npy", np.ones((12, 3, 32, 32), np.float32))
    write_pictures(folder / "images", 4)
    qdqtool.insert(folder / "float.onnx", folder / "images", predict=False).save(folder / "q.onnx")
    return folder


@pytest.fixture(autouse=True)
def inside(files: Path) -> Iterator[None]:
    with contextlib.chdir(files):
        yield
    assert sorted(p.name for p in files.iterdir()) == ["a.npy", "float.onnx", "images", "q.onnx"]


INSERT, TUNE = "insert float.onnx --calib images", "tune float.onnx --calib images --no-state"
TABLE = "insert float.onnx --calib-table t"
EXTRACT = "extract q.onnx -o e.onnx --node c"


def test_predict_names_the_command_that_compares_times(cli: Cli) -> None:
    message = cli.refuse("predict", "q.onnx", "--fail-on", "slower")
    assert "'qdqtool compare A B --gpu NAME --fail-on slower' compares times" in message


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        *(
            (line, f"option-without-effect {parameter}")
            for line, parameter in (
                (f"{INSERT} --size 64", "size"),
                (f"{TUNE} --size 64", "size"),
                ("predict q.onnx --calib images --size 64", "size"),
                ("fix q.onnx -o f.onnx --calib images --size 64", "size"),
                ("compare float.onnx q.onnx --calib images --size 64", "size"),
                (f"{INSERT} --percentile 99", "percentile"),
                (f"{INSERT} --percentile 99 --method-for x=max", "percentile"),
                (f"{TUNE} --percentile 99", "percentile"),
                (f"{INSERT} --overwrite-cache", "overwrite_cache"),
                (f"{TABLE} --method mse", "method"),
                (f"{TABLE} --max-images 9", "max_images"),
                (f"{TABLE} --calib-cache c", "calib_cache"),
                (f"{TABLE} --losses 2", "losses"),
                (f"{TABLE} --bgr", "bgr"),
                ("predict q.onnx --bgr", "bgr"),
                ("predict q.onnx --preprocess yolo", "preprocess"),
                ("fix q.onnx -o f.onnx --mean 1", "mean"),
                ("compare float.onnx q.onnx --std 1", "std"),
                ("compare float.onnx q.onnx --max-images 9", "max_images"),
                ("predict q.onnx --gpu L4 --power 15W", "power"),
                ("predict q.onnx --gpu orin-nx --clock 600 --power 15W", "power"),
                (f"{TUNE} --gpu T4 --power MAXN", "power"),
                (f"{INSERT} --gpu T4 --power MAXN", "power"),
                ("fix q.onnx -o f.onnx --gpu T4 --power 15W", "power"),
                ("compare float.onnx q.onnx --gpu T4 --power 15W", "power"),
                ("report q.onnx --gpu T4 --power 15W", "power"),
                (f"{INSERT} --power 15W", "gpu"),
                ("fix q.onnx -o f.onnx --power 15W", "gpu"),
                ("compare float.onnx q.onnx --power 15W", "gpu"),
                ("report q.onnx --power 15W", "gpu"),
                (f"{TUNE} --check-timeout 5", "check_timeout"),
                (f"{EXTRACT} --check-timeout 5", "check_timeout"),
                (f"{EXTRACT} --limit 5", "limit"),
                ("verify q.onnx build.log --sm 86", "sm"),
                ("verify q.onnx --builder trtexec --gpu L4", "gpu"),
                ("explain --list ZP-NONZERO", "what"),
                ("explain --list --for python", "way"),
                (f"{INSERT} --mixed-cpus", "mixed_cpus"),
                (f"{TABLE} --cluster local:2", "cluster"),
                (f"{TUNE} --mixed-cpus", "mixed_cpus"),
                (f"{TUNE} --budget-ms 3", "gpu"),
                ("predict q.onnx --clock 1000", "gpu"),
                ("predict q.onnx --require-gain 1.1", "require_gain"),
                ("verify --from-log build.log --gpu T4", "gpu"),
            )
        ),
        ("insert float.onnx", "missing-argument calib"),
        (f"{INSERT} --calib-table T", "option-conflict calib_table"),
        (f"{INSERT} --method-for max", "BadParameter method_for"),
        (f"{INSERT} --size big", "BadParameter size"),
        (f"{INSERT} --mean 1,2", "BadParameter mean"),
        (f"{INSERT} --max-images 0", "BadParameter max_images"),
        (f"{TUNE} --time-limit soon", "BadParameter time_limit"),
        (f"{TUNE} --state s", "option-conflict state"),
        ("predict q.onnx --require c --require nothing", "no-match required"),
        ("predict q.onnx --require [", "BadParameter --require"),
        ("predict q.onnx --fail-on SKIP-FLAOT", "BadParameter --fail-on"),
        ("predict q.onnx --gpu T4 --require-gain nan", "BadParameter --require-gain"),
        ("predict q.onnx --assume silu-add", "wrong-format assume"),
        ("predict q.onnx --for python --for onnxruntime", "option-conflict way"),
        ("predict q.onnx --assume x=a --assume x=b", "option-conflict assume"),
        ("predict q.onnx other.onnx --format json", "option-conflict model"),
        ("compare float.onnx q.onnx --gpu T4 --gpu L4 --power 15W", "option-conflict gpu"),
        ("build float.onnx --sm x", "wrong-format sm"),
        ("build float.onnx --sm 86 --builder trtexec", "option-conflict sm"),
        ("build float.onnx --shapes images", "wrong-format shapes"),
        ("build float.onnx --shapes a:1x2,1x2", "wrong-format shapes"),
        ("build float.onnx --builder tvm", "BadParameter builder"),
        ("verify --from-log", "option-conflict from_log"),
        ("verify --from-log build.log --builder trtexec", "option-conflict from_log"),
        ("verify q.onnx build.log --builder trtexec", "option-conflict builder"),
        ("verify q.onnx", "missing-argument files"),
        ("explain SKIPFLOAT", "unknown-choice what"),
        ("explain what ails thee", "unknown-choice what"),
        ("explain", "missing-argument what"),
        ("demo -o d --size 100", "out-of-range size"),
        ("demo -o d --size 992", "out-of-range size"),
        (f"demo -o d --images {2**63}", "BadParameter images"),
        ("demo -o d --target trt1", "unknown-choice target"),
    ],
)
def test_wrong_option_is_refused(cli: Cli, line: str, cause: str) -> None:
    cli.refuse(*line.split(), cause=cause)


@pytest.mark.parametrize(
    "options",
    ["--size 32", "--percentile 99 --method-for x=percentile"],
    ids=["size", "percentile"],
)
def test_option_with_effect_is_accepted(cli: Cli, tmp_path: Path, options: str) -> None:
    output = tmp_path / "same.onnx"
    cli(*INSERT.split(), *options.split(), "--no-predict", "-o", output)
    assert not any("size" in p.key for p in onnx.load(output).metadata_props)


@pytest.mark.parametrize("option", ["--bgr", "--preprocess imagenet", ""])
@pytest.mark.parametrize(
    ("line", "noted"),
    [
        ("insert float.onnx -o {} --calib a.npy", True),
        ("insert float.onnx -o {} --calib a.npy --input-type uint8", False),
        ("insert float.onnx -o {} --calib images", False),
        ("predict q.onnx --calib a.npy", True),
        ("fix q.onnx -o {} --calib a.npy", True),
        ("compare float.onnx q.onnx --calib a.npy", True),
        ("compare float.onnx q.onnx --calib images", False),
    ],
)
def test_preprocessing_of_arrays_is_noted(
    cli: Cli, tmp_path: Path, line: str, noted: bool, option: str
) -> None:
    notes = cli.json(*f"{line} {option}".replace("{}", str(tmp_path / "o.onnx")).split())["notes"]
    assert sum("no effect" in n and "a.npy" in n for n in notes) == (noted and bool(option))


def test_clock_of_an_unknown_gpu_is_refused() -> None:
    assert find_build_gpu(Build()) is None
    with pytest.raises(QdqtoolError, check=has("option-without-effect", parameter="clock")):
        find_build_gpu(Build(), clock=1000.0)
