"""Calibration caches: first line by version, contents, and the build with them."""

import shlex
import struct
from pathlib import Path

import numpy as np
import pytest

import qdqtool
from qdqtool.errors import QdqtoolError
from qdqtool.insertion.calibration_cache import cache_header, list_float_tensors
from qdqtool.insertion.ranges import write_table
from qdqtool.insertion.result import Insertion
from qdqtool.ir.graph import Model
from qdqtool.trt.targets import target_named
from tests.errors import has
from tests.insertion.nets import Net, detector, images, one_layer, open_session


@pytest.mark.parametrize(
    ("target", "number"),
    [
        ("8.5.2", 8502),
        ("8.5.10", 8510),
        ("8.6.1.6", 8601),
        ("10.3", 100300),
        ("10.3.0.30", 100300),
        ("10.13.3", 101303),
        # Without a patch or a minor version: that of JetPack.
        ("trt8.0", 8001),
        ("8.2", 8201),
        ("8.4", 8401),
        ("8.5", 8502),
        ("8.6", 8602),
        ("trt10", 100300),
    ],
)
def test_first_line_is_that_of_the_target(target: str, number: int) -> None:
    assert cache_header(target_named(target)) == f"TRT-{number}-EntropyCalibration2"


@pytest.mark.parametrize("target", ["11", "11.4", "rtx1.7"])
def test_targets_without_calibrators_are_refused(target: str) -> None:
    with pytest.raises(QdqtoolError, check=has("unsupported", parameter="target")):
        cache_header(target_named(target))


def read_cache(path: Path) -> dict[str, float]:
    """Decode a cache with numpy: big-endian hexadecimal floats."""
    scales = {}
    for line in path.read_text().splitlines()[1:]:
        name, _, digits = line.rpartition(": ")
        assert len(digits) == 8
        scales[name] = float(np.array([int(digits, 16)], np.uint32).view(np.float32)[0])
    return scales


def quantize(**options: object) -> Insertion:
    return qdqtool.insert(detector(), images(3, 3, 64, "images"), predict=False, **options)  # type: ignore[arg-type]


def test_cache_of_insert_has_every_tensor(tmp_path: Path) -> None:
    result = quantize(target="8.5.2", head="none")
    report = write_table(result, tmp_path / "t.cache")
    assert (tmp_path / "t.cache").read_text().startswith("TRT-8502-EntropyCalibration2\n")
    scales = read_cache(tmp_path / "t.cache")
    assert set(scales) == set(list_float_tensors(Model(detector()))) and not report.scales.missing
    for entry in result.activations:
        if entry.tensor in scales:
            assert scales[entry.tensor] == np.float32(entry.scale)


def test_other_tensors_are_measured_on_the_data(tmp_path: Path) -> None:
    result = qdqtool.insert(one_layer(), images(), predict=False, head="none", method="max")
    report = write_table(result, tmp_path / "t.cache")
    assert report.scales.rules == {"x": "quantizer", "c.out": "measured", "r.out": "measured"}
    model = Model(one_layer()).proto

    session = open_session(model.SerializeToString())
    largest = max(float(np.abs(session.run(None, sample)[0]).max()) for sample in images())
    assert read_cache(tmp_path / "t.cache")["r.out"] == pytest.approx(largest / 127, rel=1e-5)


def test_cache_from_a_table_completes_it_without_data(tmp_path: Path) -> None:
    net = Net()
    model = net.output(net.conv("c1", net.op("Relu", "r", net.conv("c0", "x")))).model()
    table = tmp_path / "in.cache"
    pack = lambda value: struct.pack("!f", value).hex()  # noqa: E731
    table.write_text(f"TRT-8502-EntropyCalibration2\nx: {pack(0.5)}\nr.out: {pack(0.25)}\n")
    result = qdqtool.insert(model, calib_table=table, predict=False, head="none")
    report = write_table(result, tmp_path / "out.cache")
    assert read_cache(tmp_path / "out.cache") == {"x": 0.5, "c0.out": 0.25, "r.out": 0.25}
    assert report.scales.missing == ["c1.out"]
    assert report.precisions.layers == {"c0": "int8", "c1": "int8"}
    assert report.precisions.outputs == {"c1": "fp16"}
    assert "c1.out" in "\n".join(report.lines())


def test_build_command_names_cache_model_and_precisions(tmp_path: Path) -> None:
    report = write_table(quantize(target="10.3"), tmp_path / "t.cache")
    words = shlex.split(report.command)
    assert {f"--calib={tmp_path / 't.cache'}", "--int8", "--fp16", "--useDLACore=0"} <= set(words)
    assert any(word.startswith("--layerPrecisions=") for word in words)
    assert report.as_json()["flags"] == [w for w in words if "recision" in w or "OutputTypes" in w]


def test_versions_without_precisions_of_layers(tmp_path: Path) -> None:
    report = write_table(quantize(target="8.2"), tmp_path / "t.cache")
    assert "--layerPrecisions" not in report.command and report.as_json()["flags"] == []
