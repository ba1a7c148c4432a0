import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxruntime.quantization import CalibrationMethod
from onnxruntime.quantization.calibrate import TensorData, TensorsData, save_tensors_data

from calibration.range_tables import read_range_table
from qdqtool.errors import DataError
from tests.calibration.checks import check_limit
from tests.errors import has


def write(folder: Path, content: Any, name: str = "table") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def aimet_0_6_1(**changes: Any) -> dict[str, Any]:
    entry = {
        "bitwidth": 8,
        "dtype": "int",
        "is_symmetric": "False",
        "min": -1.0,
        "max": 2.54,
        "offset": -72,
        "scale": 3.54 / 255,
    }
    return {"version": "0.6.1", "activation_encodings": {"x": [{**entry, **changes}]}}


def aimet_1_0_0(**changes: Any) -> dict[str, Any]:
    entry = {
        "name": "x",
        "bw": 8,
        "dtype": "INT",
        "enc_type": "PER_TENSOR",
        "is_sym": False,
        "offset": [-55],
        "scale": [0.0127],
    }
    return {"version": "1.0.0", "activation_encodings": [{**entry, **changes}]}


def aimet_2_0_0(**changes: Any) -> dict[str, Any]:
    entry = {"name": "x", "output_dtype": "uint8", "y_scale": 0.0127, "y_zero_point": 55}
    return {"version": "2.0.0", "encodings": [{**entry, **changes}]}


def ppq_operations(**changes: Any) -> dict[str, Any]:
    entry = {
        "bit_width": 8,
        "policy": {"PER_TENSOR": True, "SYMMETRICAL": True},
        "state": "ACTIVATED",
        "quant_min": -128,
        "quant_max": 127,
        "hash": 11,
        "dominator": 12,
    }
    values = {"12": {"scale": [0.02], "zero_point": [0]}}
    return {"configs": {"conv": {"x": {**entry, **changes}}}, "dispatchings": {}, "values": values}


def ppq_ppl(**changes: Any) -> dict[str, Any]:
    entry = {
        "bit_width": 8,
        "per_channel": False,
        "scale": [0.02],
        "zero_point": [0],
        "q_min": -128,
        "q_max": 127,
    }
    return {"quant_info": {"x": {**entry, **changes}}, "op_info": {}}


CASES = {
    "TensorRT": (f"TRT-10300-EntropyCalibration2\nx: {struct.pack('!f', 0.02).hex()}\n", 0.02),
    "AIMET 0.6.1, asymmetric": (aimet_0_6_1(), 2.54 / 127),
    "AIMET 0.6.1, symmetric": (
        aimet_0_6_1(is_symmetric="True", min=-2.56, max=2.54, offset=-128, scale=0.02),
        0.02,
    ),
    "AIMET 1.0.0, asymmetric": (aimet_1_0_0(), 0.0127 * 200 / 127),
    "AIMET 1.0.0, symmetric": (aimet_1_0_0(is_sym=True, offset=[-128], scale=[0.02]), 0.02),
    "AIMET 2.0.0, uint8": (aimet_2_0_0(), 0.0127 * 200 / 127),
    "AIMET 2.0.0, int8": (
        {"version": "2.0.0", "encodings": [{"name": "x", "output_dtype": "int8", "y_scale": 0.02}]},
        0.02,
    ),
    "PPQ": (ppq_operations(), 0.02),
    "PPQ with its own scale": (
        {**ppq_operations(scale=[0.02], offset=[0]), "values": {}},
        0.02,
    ),
    "PPQ, asymmetric": (
        ppq_ppl(scale=0.0127, zero_point=55, q_min=0, q_max=255),
        0.0127 * 200 / 127,
    ),
    "PPQ for PPL": (ppq_ppl(), 0.02),
    "PPQ for TensorRT": ({"act_quant_info": {"x": 2.54}}, 0.02),
    "onnxruntime, ranges": ({"x": [-1.0, 2.54]}, 0.02),
    "onnxruntime, negative": ({"x": [-2.54, 1.0]}, 0.02),
    "onnxruntime, ranges of numpy": (
        {
            "x": [
                {"CLS": "numpy.array", "data": -1.0, "dtype": "float32"},
                {"CLS": "numpy.array", "data": [2.54], "dtype": "float32"},
            ]
        },
        0.02,
    ),
    "onnxruntime, calibration.cache": ("x 2.54\n", 0.02),
    "MQBench for TensorRT": ({"tensorrt": {"blob_range": {"x": 2.54}}}, 0.02),
    "MQBench for SNPE": (
        {"activation_encodings": {"x": [{"bitwidth": 8, "min": 0.0, "max": 2.54}]}},
        0.02,
    ),
    "MQBench for PPL": (
        {"ppl": {"x": {"step": 0.01, "zero_point": 3, "min": -1, "max": 2.54, "bit": 8}}},
        0.02,
    ),
    "MQBench, symmetric": (
        {"ppl": {"x": {"step": 0.02, "zero_point": 0, "min": -2.56, "max": 2.54, "bit": 8}}},
        0.02,
    ),
    "largest values": ({"x": 2.54}, 0.02),
    "ends": ({"x": {"min": -2.54, "max": 1}}, 0.02),
    "amax": ({"x": {"amax": [2.54]}}, 0.02),
    "scales": ({"x": {"scale": 0.02, "zero_point": 0}}, 0.02),
    "Paddle2ONNX": ("x: 2.540000\n", 0.02),
    "Paddle2ONNX 0.9": ("x: 2.54, 2.54", 0.02),
}


@pytest.mark.parametrize("smooth", [False, True])
def test_file_that_onnxruntime_wrote(tmp_path: Path, smooth: bool) -> None:
    ranges = {
        "a": TensorData(lowest=np.float32(-0.27), highest=np.float32(2.5)),
        "b:0": TensorData(lowest=np.array([-3.0], np.float32), highest=np.array([1], np.float32)),
    }
    path = tmp_path / "ranges.json"
    save_tensors_data(TensorsData(CalibrationMethod.MinMax, ranges), path, smooth_quant=smooth)
    assert read_range_table(path).scales == {
        "a": pytest.approx(2.5 / 127),
        "b:0": pytest.approx(3 / 127),
    }


@pytest.mark.parametrize(
    ("content", "scales", "skipped"),
    [
        *((content, {"x": scale}, []) for content, scale in CASES.values()),
        (
            "\ufeffnet/a:0: 2.54\nimage 1: 1.27\n\nper.channel.weight\n",
            {"net/a:0": 0.02, "image 1": 0.01},
            ["per.channel.weight"],
        ),
        ("TRT-1", {}, []),
        ("TRT-1\n\n  \nzero: 0\n", {"zero": 0.0}, []),
        ("TRT-1\na:b : 3f800000\n", {"a:b": 1.0}, []),
        ("TRT-1\nsmall: 1\n", {"small": 2.0**-149}, []),
    ],
    ids=[*CASES, "ranges", "no tensor", "zero", "colon", "smallest"],
)
def test_scales_are_read(
    tmp_path: Path, content: Any, scales: dict[str, float], skipped: list[str]
) -> None:
    table = read_range_table(write(tmp_path, content))
    assert table.scales == pytest.approx(scales, rel=1e-6, abs=0.0) and table.skipped == skipped


def test_largest_of_several_entries_counts(tmp_path: Path) -> None:
    content = ppq_operations()
    content["configs"]["add"] = {"x": {**content["configs"]["conv"]["x"], "dominator": 13}}
    content["values"]["13"] = {"scale": 0.05, "zero_point": 0}
    assert read_range_table(write(tmp_path, content)).scales == {"x": 0.05}


@pytest.mark.parametrize(
    "content",
    [
        aimet_0_6_1(bitwidth=16),
        aimet_0_6_1(dtype="float"),
        {"activation_encodings": {"x": aimet_0_6_1()["activation_encodings"]["x"] * 2}},
        aimet_1_0_0(bw=4),
        aimet_1_0_0(dtype="FLOAT"),
        aimet_1_0_0(scale=[0.1, 0.2]),
        aimet_2_0_0(output_dtype="uint16"),
        aimet_2_0_0(y_scale=[0.1, 0.2]),
        ppq_operations(bit_width=4),
        {**ppq_operations(), "values": {"12": {"scale": None, "zero_point": None}}},
        ppq_ppl(scale=[0.1, 0.2]),
        {"ppl": {"x": {"step": 0.1, "zero_point": 0, "min": -1, "max": 1, "bit": 4}}},
        {"ppl": {"x": {"step": [0.1, 0.2], "zero_point": [0, 0], "min": [0, 0], "max": [1, 1]}}},
        {"x": {"scale": 0.1, "zero_point": 7}},
        {"CLS": "TensorsData", "data": {"x": {"CLS": "TensorData", "avg": 1.0, "std": 1.0}}},
    ],
    ids=str,
)
def test_entry_without_a_single_scale_of_8_bits_is_counted(tmp_path: Path, content: Any) -> None:
    table = read_range_table(write(tmp_path, content))
    assert (table.scales, table.skipped) == ({}, ["x"])


@pytest.mark.parametrize(
    "content",
    [
        '{"x": [NaN, 1.0]}',
        '{"x": [-Infinity, 1.0]}',
        '{"x": [1.0, -1.0]}',
        "x: nan",
        "x: inf",
        "x: -2.5",
        '{"act_quant_info": {"x": NaN}}',
        '{"x": NaN}',
        {"x": -1.0},
        {"tensorrt": {"blob_range": {"x": math.inf}}},
        {"x": {"min": 1.0, "max": -1.0}},
        aimet_0_6_1(is_symmetric="True", scale=-0.1),
        aimet_1_0_0(is_sym=True, scale=[math.inf]),
        aimet_2_0_0(y_scale=-1.0),
        ppq_ppl(scale=[-0.02]),
    ],
    ids=str,
)
def test_unusable_range_is_refused(tmp_path: Path, content: Any) -> None:
    path = write(tmp_path, content)
    with pytest.raises(DataError, check=has("invalid-scale", path=str(path), node="x")):
        read_range_table(path)


TABLE = "TRT-8601-MinMaxCalibration\ny: 3f800000\n"


@pytest.mark.parametrize(
    ("content", "code", "values"),
    [
        *(
            (content, code, [])
            for content, code in (
                ("", "wrong-format"),
                ("only words\n", "wrong-format"),
                ("{", "wrong-format"),
                ("[" * 100_000, "wrong-format"),
                ("[1, 2]", "wrong-format"),
                ({}, "wrong-format"),
                ({"x": 2.54, "y": "many"}, "wrong-format"),
                ({"x": {"min": 0.0}}, "invalid-line"),
                ({"x": {"scale": "s"}}, "invalid-line"),
                ({"layers": [{"name": "x"}]}, "wrong-format"),
                ({"Layers": [], "Bindings": []}, "wrong-format"),
                ("x: 3c23d70a\ny: 3f000000\n", "wrong-format"),  # the first line is missing
                ("x: 1.0\ny: many\n", "invalid-line"),
                ({"activation_encodings": {"x": [{"bitwidth": 8}]}}, "invalid-line"),
                ({"activation_encodings": [{"name": "x"}]}, "invalid-line"),
                ({"activation_encodings": [7]}, "invalid-line"),
                ({"version": "2.0.0", "encodings": [{"name": "x"}]}, "invalid-line"),
                ({"configs": {"conv": {"x": 1}}}, "invalid-line"),
                ({"x": ["a", "b"]}, "wrong-format"),
                ({"x": [1.0]}, "invalid-line"),
                ({"x": [True, False]}, "invalid-line"),
            )
        ),
        ("\nTRT-1\n", "wrong-format", []),
        (" TRT-1\n", "wrong-format", []),
        (TABLE + "nocolon\n", "invalid-line", ["line 3"]),
        (TABLE + "x: 3f8000001\n", "invalid-line", ["line 3"]),
        (TABLE + "x: 3f80000000\n", "invalid-line", ["line 3"]),
        (TABLE + "x: 3g800000\n", "invalid-line", ["line 3"]),
        (TABLE + ": 3f800000\n", "invalid-scale", ["line 3", "1", "''"]),
        (TABLE + "x: 7f800000\n", "invalid-scale", ["line 3", "inf", "'x'"]),
        (TABLE + "x: 7fc00000\n", "invalid-scale", ["line 3", "nan", "'x'"]),
        (TABLE + "x: 80000001\n", "invalid-scale", ["line 3", "-1.4013e-45", "'x'"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_contents_are_refused(
    tmp_path: Path, content: Any, code: str, values: list[str]
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(DataError, check=has(code, *values, path=str(path))) as caught:
        read_range_table(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\x0c\0\0\0\xff\xfe", b"TRT-1\n\xff: 0\n"])
def test_binary_tables_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "calibration.flatbuffers"
    path.write_bytes(content)
    with pytest.raises(DataError, check=has("wrong-encoding", "calibration.json", path=str(path))):
        read_range_table(path)


def test_size_is_limited(tmp_path: Path) -> None:
    path = write(tmp_path, "x: 2.54\n")
    check = has("file-too-large", path=str(path))
    check_limit("LIST_FILE", path.stat().st_size, lambda: read_range_table(path), check)
