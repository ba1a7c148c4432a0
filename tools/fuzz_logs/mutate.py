"""Small logs of every dialect, with accidental and hostile mutations."""

import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path

Mutation = Callable[[bytes, random.Random], bytes]

DATA = Path(__file__).parents[2] / "tests" / "data"
TRTEXEC_LOG = (DATA / "logs" / "small-trt852.txt").read_text("utf-8")
OLD_LOG = "\n".join(
    [
        "[TensorRT] VERBOSE: Original: 12 layers",
        "[TensorRT] VERBOSE: Running: EltReluFusion",
        "[TensorRT] VERBOSE: EltReluFusion: Fusing Add_1 with Relu_2",
        "[TensorRT] VERBOSE: Merging layers: Conv_1 + Relu_2 || Conv_3 + Relu_4",
        "[TensorRT] VERBOSE: Engine Layer Information:",
        "Layer(Scale): QuantizeLinear_2_quantize_scale_node, Tactic: 0, input[Float(1,3,-17,-18)] -> "
        "255[Int8(1,3,-17,-18)]",
        "Layer(CaskConvolution): PWN(PWN(a + b), c) || d, Tactic: -494, x[Half(1,8,9,9)], PWN(a, b)[Int8(1,8,9,9)] -> "
        "y[Float(1,8,9,9)]",
        "[TensorRT] INFO: === Profile (1434 iterations ) ===",
        "[TensorRT] INFO:    Time(ms)     Avg.(ms)   Median(ms)   Time(%)   Layer",
        "[TensorRT] INFO:      84.73       0.0591       0.0594       3.7   Conv_237 + Relu_238",
        "",
    ]
)
INFO = "\n".join(
    [
        "Layers:",
        "Name: a + (Unnamed Layer* 3) [Shuffle], LayerType: CaskConvolution, Inputs: [ { Name: x, Location: "
        "Device, Dimensions: "
        "[1,3,8,8], Format/Datatype: Four wide channel vectorized row major Int8 format }], Outputs: [ { Name: y, "
        "Location: "
        "Device, Dimensions: [1,16,4,4], Format/Datatype: Half }], ParameterType: Convolution, Kernel: [3,3], "
        'Weights: {"Type": '
        '"Int8", "Count": 432}, TacticValue: 0x12, Metadata: [ONNX Layer: a]\x1e[ONNX Layer: b]',
        "Name: {ForeignNode[a...b]}, LayerType: Myelin, Inputs: [], Outputs: [], TacticValue: 0x0",
        "",
        "Bindings:",
        "x",
        "y",
        "",
    ]
)
_INT8 = "Thirty-two wide channel vectorized row major Int8 format"
_FP16 = "Row major linear FP16 format"
CONV = {
    "Name": "conv",
    "LayerType": "CaskConvolution",
    "Inputs": [
        {"Name": "x", "Dimensions": [2, 64, 56, 56], "Format/Datatype": _INT8},
        {"Name": "r", "Dimensions": [2, 128, 28, 28], "Format/Datatype": _FP16},
    ],
    "Outputs": [{"Name": "y", "Dimensions": [2, 128, 28, 28], "Format/Datatype": _FP16}],
    "Kernel": [3, 3],
    "Stride": [2, 2],
    "OutMaps": 128,
    "Groups": 1,
    "Weights": {"Type": "Int8", "Count": 128 * 64 * 9},
}
JSON = {
    "Layers": [
        CONV,
        {
            "Name": "q",
            "LayerType": "Reformat",
            "Origin": "QDQ",
            "Metadata": "[ONNX Layer: q]\u001f[ONNX Layer: r]",
            "Inputs": [
                {"Name": "x", "Dimensions": [1, 3, 8, 8], "Datatype": "Float", "Format": "(Linear)"}
            ],
            "Outputs": [
                {"Name": "y", "Dimensions": [1, 3, 8, 8], "Datatype": "Int8", "Format": "(NHWC)"}
            ],
        },
    ],
    "Bindings": ["x", "y"],
}
_TOKENS = [{"Name": "__mln_k_arg__bb1_2", "Dimensions": [1, -1, 64], "Format/Datatype": "Int8"}]
TEN = {  # TensorRT 10: rows of Myelin with streams and events; inputs and outputs are objects
    "Layers": [
        {
            "Name": "wait^3_myl2_3",
            "LayerType": "wait",
            "Inputs": [],
            "Outputs": [],
            "TacticName": "",
            "StreamId": 3,
            "EventId": 8,
            "Metadata": "",
        },
        {
            "Name": "__myl_MulMinMaxRounCast_myl0_1",
            "LayerType": "kgen",
            "Outputs": _TOKENS,
            "Inputs": [{"Name": "x", "Dimensions": [1, -1, 64], "Format/Datatype": "Half"}],
            "Metadata": "[ONNX Layer: x_q]",
        },
        {
            "Name": "__myl_FcCast_myl0_2",
            "LayerType": "fusion",
            "Inputs": [
                *_TOKENS,
                {"Name": "__mye7dconst", "Dimensions": [1, 64, 8], "Format/Datatype": "FP8"},
            ],
            "Outputs": [{"Name": "y", "Dimensions": [1, -1, 8], "Format/Datatype": "BFloat16"}],
            "StreamId": 0,
            "TacticName": "sm80_xmma_gemm_i8f32_i8i32",
            "Metadata": "[ONNX Layer: attn/MatMul]\u001f[ONNX Layer: x_dq]\u001e[ONNX Layer: x_q]\u001f[ONNX Layer: w_dq]",
        },
    ],
    "I/O Tensors": [{"Name": "x", "IOMode": "Input"}, {"Name": "y", "IOMode": "Output"}],
}
TEN_LOG = "\n".join(
    [
        "&&&& RUNNING TensorRT.trtexec [TensorRT v101401] [b1] # trtexec --onnx=m.onnx --int8 --verbose",
        "[I] === Device Information ===",
        "[I] Available Devices: ",
        '[I]   Device 0: "NVIDIA L4" UUID: GPU-1',
        "[I] Selected Device: NVIDIA L4",
        "[I] Compute Capability: 8.9",
        "[I] SMs: 58",
        "[I] ",
        "[I] TensorRT version: 10.14.1",
        "[V] Original: 9 layers",
        "[V] {ForeignNode[x_q...attn/Add]}",
        "[V] Graph optimization time: 0.1 seconds.",
        "[V] Engine Layer Information:",
        "Layers:",
        "Name: {ForeignNode[x_q...attn/Add]}_myl0_1, LayerType: kgen, Inputs: [ { Name: x, Dimensions: [1,-1,64], "
        "Format/Datatype: Half }], Outputs: [ { Name: y, Dimensions: [1,-1,8], Format/Datatype: Int8 }], TacticName: "
        "__myl_Cast_0x1, StreamId: 0, Metadata: [ONNX Layer: x_q]\x1f[ONNX Layer: w_dq]",
        "",
        "I/O Tensors:",
        " Name: x, IOMode: input",
        "[V] Engine Metadata: 1",
        "&&&& PASSED TensorRT.trtexec [TensorRT v101401] # trtexec",
        "",
    ]
)
RTX_LOG = "\n".join(
    [  # TensorRT-RTX, a network with one convolution
        "[I] Input filename:   one.onnx",
        "[I] Opset version:    17",
        "[V] Adding network input: x with dtype: float32, dimensions: (1, 32, 8, 8)",
        "[V] Importing initializer: w",
        "[V] Static check for parsing node: cv [Conv]",
        "[V] Parsing node: cv [Conv]",
        "[V] Searching for input: x",
        "[V] cv [Conv] inputs: [x -> (1, 32, 8, 8)[FLOAT]], [w -> (64, 32, 1, 1)[FLOAT]], ",
        "[V] Registering layer: cv for ONNX node: cv",
        "[V] cv [Conv] outputs: [y -> (1, 64, 8, 8)[FLOAT]], ",
        "[V] Marking y_1 as output: y",
        "[V] Original: 3 layers",
        "[V] SYMBOLIC CHECKS",
        "[V] GRAPH NODES",
        "[V] CONSTANT w",
        "[V]     Output 0",
        "Layers:",
        "Name: cv_myl0_1, LayerType: correlation, Inputs: [ { Name: x, Dimensions: [1,32,8,8], Datatype: Int8, Format: "
        "(1,8,8,32) }], Outputs: [ { Name: y, Dimensions: [1,64,8,8], Datatype: Float, Format: (Linear) }], TacticName: t, "
        "StreamId: 0, Metadata: [ONNX Layer: cv]\x1e[ONNX Layer: w.q]",
        "",
        "I/O Tensors:",
        " Name: x, IOMode: input",
        " Name: y, IOMode: output",
        "",
    ]
)
PROFILE = [
    {"count": 10},
    {"name": "conv", "timeMs": 1.5, "averageMs": 0.15, "medianMs": 0.15, "percentage": 100.0},
]


def seeds() -> list[bytes]:
    return [
        TRTEXEC_LOG.encode(),
        OLD_LOG.encode(),
        INFO.encode(),
        json.dumps(JSON).encode(),
        json.dumps(PROFILE, indent=1).encode(),
        b'{"Layers": ["a + b",\n"PWN(c)"],\n"Bindings": ["x"]}',
        RTX_LOG.encode(),
        json.dumps(TEN).encode(),
        TEN_LOG.encode(),
    ]


def _cut(data: bytes, rng: random.Random) -> bytes:
    first, last = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[first:last] if rng.random() < 0.3 else data[:last]


def _flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3, 30, 300))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _repeat(data: bytes, rng: random.Random) -> bytes:
    first, last = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:last] + data[first:last] * rng.choice((1, 2, 20)) + data[last:]


def _shuffle(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    for _ in range(rng.randrange(1, 40)):
        a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[a], lines[b] = lines[b], lines[a]
    return b"\n".join(lines)


def _drop_lines(data: bytes, rng: random.Random) -> bytes:
    return b"\n".join(line for line in data.split(b"\n") if rng.random() < 0.8)


def _long_line(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    number = rng.randrange(len(lines))
    piece = rng.choice(
        (
            b"A",
            b" + a",
            b"(",
            b"PWN(",
            b"[",
            b", ",
            b" || ",
            b"{ Name: ",
            b" -> ",
            b"], [",
            b"[Int8(",
            b"_myl1_",
            b"x [Conv] inputs: [",
            b"\x1b[",
            b" (Int8[",
            b"_clone_1",
            b"\\",
            b"9",
            b", Tactic: ",
            b" with ",
        )
    )
    lines[number] = lines[number] + piece * rng.choice((100, 5000, 60_000))
    return b"\n".join(lines)


def _numbers(data: bytes, rng: random.Random) -> bytes:
    """Replace digits by a number that readers do not expect."""
    hostile = rng.choice(
        (b"9" * 400, b"-1", b"1e999", b"nan", b"0", b"1" + b"0" * 30, b"0x", b"--", b".")
    )
    places = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
    if not places:
        return data
    changed = data
    for at in sorted(rng.sample(places, min(len(places), rng.choice((1, 5)))), reverse=True):
        changed = changed[:at] + hostile + changed[at + 1 :]
    return changed


def _nest(data: bytes, rng: random.Random) -> bytes:
    depth = rng.choice((50, 2000, 100_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"PWN(", b")")))
    at = rng.randrange(len(data))
    return (
        data[:at] + opening * depth + (closing * depth if rng.random() < 0.5 else b"") + data[at:]
    )


def _words(data: bytes, rng: random.Random) -> bytes:
    """Replace a word of the format by another word, so that a line is at a wrong place."""
    words = (
        b"inputs",
        b"outputs",
        b"Layer(",
        b"Tactic",
        b"Running: ",
        b" on ",
        b" with ",
        b" into ",
        b"Name: ",
        b"null",
        b"true",
        b"=== Profile (1 iterations ) ===",
        b"&&&& RUNNING",
        b"Bindings:",
        b'"Layers"',
        b"I/O Tensors:",
        b"=== Device Information ===",
        b"[ONNX Layer: ",
        b"__myl_",
        b"StreamId",
        b"\x1e",
        b"\x00",
        b"\xff\xfe",
        b"\r",
        b"",
    )
    old, new = rng.choice(words[:-4]), rng.choice(words)
    return data.replace(old, new, rng.choice((1, -1)))


def _pack(data: bytes, rng: random.Random) -> bytes:
    packed = gzip.compress(data, mtime=0) if rng.random() < 0.5 else lzma.compress(data)
    return rng.choice((lambda d, _r: d, _cut, _flip))(packed, rng)


def _wide(data: bytes, rng: random.Random) -> bytes:
    return (
        b"\xff\xfe"
        + data.decode("latin-1").encode("utf-16-le")[: rng.randrange(1, 2 * len(data) + 1)]
    )


def _mix(data: bytes, rng: random.Random) -> bytes:
    other = rng.choice(seeds())
    at = rng.randrange(len(data))
    return data[:at] + other[rng.randrange(len(other)) :] + data[at:]


MUTATIONS: tuple[Mutation, ...] = (
    _cut,
    _flip,
    _repeat,
    _shuffle,
    _drop_lines,
    _long_line,
    _numbers,
    _nest,
    _words,
    _pack,
    _wide,
    _mix,
)


def mutated(number: int, base: int = 0) -> bytes:
    """Return a seed file with one to three mutations. Equal numbers give equal files."""
    rng = random.Random(base * 1_000_003 + number)
    data = rng.choice(seeds())
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not data:
            break
        data = rng.choice(MUTATIONS)(data, rng)
        data = data[: 8 << 20]
    return data
