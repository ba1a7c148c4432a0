"""Damage to the bytes of files, and to the structure of models, archives and JSON."""

import copy
import gzip
import io
import json
import math
import random
import warnings
import zipfile

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from tools.fuzz_logs.mutate import MUTATIONS as TEXT
from tools.growth.families import FAMILIES

_WORDS = (
    b"\x1b]0;owned\x07",
    b"\x9b31m",
    b"\xff\xfe\xff",
    b"\0",
    b"\xc2\x85",
    b"../../x",
    b"/etc/hostname",
    b"9" * 30,
    b"-1",
    b"nan",
    b"",
    b"\n",
    b"a" * 70_000,
    b"\x80" * 10,
    b"{'descr': '|O'",
    b"e\xcc\x81",
)

MAX_BYTES = 8 << 20  # bytes of a mutated file


def mutated(data: bytes, kind: str, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not data:
            break
        choice = rng.random()
        if kind == "grown.onnx" and choice < 0.8:
            data = FAMILIES[rng.choice(list(FAMILIES))](
                rng.choice((1, 5, 30, 100, 400))
            ).SerializeToString()
        elif kind == "list.txt" and choice < 0.4:
            data += b"\n" + rng.choice(_SPECIAL)
        elif kind.startswith("picture") and choice < 0.15:
            data = _large_picture(kind, rng)
        elif kind.endswith(".onnx") and choice < 0.6:
            try:
                data = _model(data, rng)
            except UnicodeDecodeError:  # protobuf decodes a text when the text is first read
                data = _bytes(data, rng)
        elif kind.endswith((".gz", ".tuning")) and choice < 0.7:
            data = _inside(data, kind, rng)
        elif kind.endswith(".npz") and choice < 0.5:
            data = _archive(data, rng)
        elif kind.endswith(".json") and choice < 0.5:
            data = mutate_json(data, rng)
        elif kind.endswith((".log", ".json", ".txt", ".cache")) and choice < 0.7:
            data = rng.choice(TEXT)(data, rng)
        else:
            data = _bytes(data, rng)
        data = data[:MAX_BYTES]
    return data


def _bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    kind = rng.randrange(6)
    if kind == 0:
        return data[:at]
    if kind == 1:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 4, 40))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if kind == 2:
        return data[:at] + rng.choice(_WORDS) + data[at:]
    if kind == 3:
        return data[:at] + data[at + rng.randrange(1, 50) :]
    if kind == 4:
        return data + data[: rng.randrange(len(data))]
    return data[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 60))) + data[at:]


def _model(data: bytes, rng: random.Random) -> bytes:
    try:
        model = onnx.ModelProto.FromString(data)
    except Exception:
        return _bytes(data, rng)
    nodes = model.graph.node
    if not nodes:
        return _bytes(data, rng)
    node = nodes[rng.randrange(len(nodes))]
    names = [t for n in nodes for t in (*n.input, *n.output) if isinstance(t, str)] or ["x"]
    kind = rng.randrange(10 + len(_DAMAGE))
    if kind >= 10:
        _DAMAGE[kind - 10](model, node, rng)
    elif kind == 0 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice([*names, ""])
    elif kind == 1 and node.output:
        node.output[rng.randrange(len(node.output))] = rng.choice(names)
    elif kind == 2:
        node.op_type = rng.choice([n.op_type for n in nodes] + ["Nothing", "If", "Loop", "Concat"])
    elif kind == 3:
        nodes.append(node)
    elif kind == 4:
        del nodes[rng.randrange(len(nodes))]
    elif kind == 5:
        hostile_tensor(model, rng.randrange(1000))
    elif kind == 6 and node.attribute:
        attribute = node.attribute[rng.randrange(len(node.attribute))]
        attribute.i = rng.choice((0, -1, 1 << 62, -(1 << 63)))
        if attribute.ints:
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(
                (0, -1, 1 << 31, 1 << 62)
            )
    elif kind == 7:
        node.name = rng.choice(
            ("\x1b[31m", "\x85\u202e", "a" * 50_000, "_clone_1" * 5000, "a\nb", "")
        )
    elif kind == 8:
        for value in (*model.graph.input, *model.graph.value_info)[:3]:
            for dim in value.type.tensor_type.shape.dim:
                dim.dim_value = rng.choice((0, -1, 1, 7, 1 << 16, 1 << 40))
    else:
        del node.input[:]
    try:
        return model.SerializeToString()
    except Exception:
        return data


def _opset(model: onnx.ModelProto, node: onnx.NodeProto, rng: random.Random) -> None:
    for opset in model.opset_import:
        opset.version = rng.choice((0, 1, 6, 13, 21, 99, 1 << 40, -1))


def _types(model: onnx.ModelProto, node: onnx.NodeProto, rng: random.Random) -> None:
    """Set a rare type for the inputs or for one stored tensor."""
    element_type = rng.choice(
        (
            TensorProto.INT4,
            TensorProto.UINT4,
            TensorProto.BFLOAT16,
            TensorProto.FLOAT8E4M3FN,
            TensorProto.STRING,
            TensorProto.COMPLEX64,
            TensorProto.DOUBLE,
            TensorProto.BOOL,
            0,
            99,
        )
    )
    if rng.random() < 0.6 or not model.graph.initializer:
        for value in model.graph.input:
            value.type.tensor_type.elem_type = element_type
    else:
        rng.choice(model.graph.initializer).data_type = element_type


def _inputs(model: onnx.ModelProto, node: onnx.NodeProto, rng: random.Random) -> None:
    """Declare an input without a name, or an existing input again, or as an output."""
    name = rng.choice(("", *(v.name for v in model.graph.input)))
    rank = rng.choice((0, 1, 3, 65))
    rng.choice((model.graph.input, model.graph.output)).append(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [rng.choice((1, 0, -1, 8))] * rank)
    )


def _bomb(model: onnx.ModelProto, node: onnx.NodeProto, rng: random.Random) -> None:
    """Add nodes of a few bytes that compute shapes from very long vectors."""
    length = rng.choice((1 << 16, 1 << 25, 1 << 40))
    kind = rng.choice((TensorProto.INT64, TensorProto.FLOAT))
    model.graph.input.append(helper.make_tensor_value_info("long", kind, [length]))
    op = rng.choice(
        (
            "Concat",
            "Add",
            "Mul",
            "Expand",
            "Gather",
            "Reshape",
            "ConstantOfShape",
            "Range",
            "Tile",
            "Slice",
            "Shape",
            "Cast",
        )
    )
    attributes = {"axis": 0} if op == "Concat" else {"to": 7} if op == "Cast" else {}
    for place in range(rng.choice((1, 3))):
        source = "long" if place == 0 else f"longer{place - 1}"
        count = 1 if op in ("ConstantOfShape", "Shape", "Cast") else rng.choice((2, 3))
        model.graph.node.insert(
            place, helper.make_node(op, [source] * count, [f"longer{place}"], **attributes)
        )


def _quantizer(model: onnx.ModelProto, node: onnx.NodeProto, rng: random.Random) -> None:
    """Change the value, shape or type of a scale or zero point."""
    read = {
        t
        for n in model.graph.node
        if n.op_type in ("QuantizeLinear", "DequantizeLinear")
        for t in n.input[1:]
    }
    stored = [t for t in model.graph.initializer if t.name in read]
    if stored:
        value = np.asarray(rng.choice((np.nan, np.inf, 0, -1, 1e-45, 3e38, 127, 200)))
        value = np.broadcast_to(value, rng.choice(((), (1,), (0,), (8,), (3, 2), (1, 1, 1, 1))))
        tensor = rng.choice(stored)
        with np.errstate(all="ignore"):
            changed = value.astype(
                rng.choice((np.float32, np.float16, np.float64, np.int8, np.uint8, np.int32))
            )
        tensor.CopyFrom(
            numpy_helper.from_array(np.ascontiguousarray(changed).reshape(value.shape), tensor.name)
        )


def _attribute(model: onnx.ModelProto, node: onnx.NodeProto, rng: random.Random) -> None:
    """Copy an attribute, change its type, or turn the attribute into a reference."""
    if not node.attribute:
        node.attribute.append(helper.make_attribute("axis", rng.choice((-1, 1, 99, 1 << 40))))
    attribute = rng.choice(node.attribute)
    kind = rng.randrange(3)
    if kind == 0:
        attribute.ref_attr_name = "outside"
    elif kind == 1:
        node.attribute.append(attribute)
    else:
        attribute.type = rng.choice((1, 2, 3, 4, 5, 6, 7, 8))


def _calls(model: onnx.ModelProto, node: onnx.NodeProto, rng: random.Random) -> None:
    """Call a local function with a constant many times after a node."""
    size, times = rng.choice(((1, 50), (1 << 18, 30), (1 << 18, 2000), (1, 4000)))
    value = helper.make_tensor("v", TensorProto.FLOAT, [size], bytes(4 * size), raw=True)
    body = [
        helper.make_node("Constant", [], ["k"], value=value),
        helper.make_node("Add", ["a", "k"], ["c"]),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    model.functions.append(helper.make_function("own", "F", ["a"], ["c"], body, opsets))
    model.opset_import.append(opsets[1])
    last = next((t for t in node.output), "x")
    name = last[:100]  # thousands of names with a million letters would fill the memory
    model.graph.node.extend(
        helper.make_node("F", [f"{name}.f{i}" if i else last], [f"{name}.f{i + 1}"], domain="own")
        for i in range(times)
    )


def _einsum(model: onnx.ModelProto, node: onnx.NodeProto, rng: random.Random) -> None:
    """Add an Einsum whose output has a dimension for each letter of its equation."""
    source = next((t for t in node.output), "x")
    left, right = rng.choice(("abcd", "...", "a")), "a" * rng.choice((4, 64, 65, 1 << 20))
    model.graph.node.append(
        helper.make_node("Einsum", [source], ["letters"], equation=f"{left}->{right}")
    )
    model.graph.output.append(helper.make_tensor_value_info("letters", TensorProto.FLOAT, None))


def _long_name(model: onnx.ModelProto, node: onnx.NodeProto, rng: random.Random) -> None:
    """Rename a tensor, at its producer and its consumers. No exporter writes the new name."""
    for old in list(node.output[:1]):
        new = rng.choice("t\u00e9_") * rng.choice((60_000, 1 << 16, (1 << 16) + 1, 1 << 20))
        for other in model.graph.node:
            for names in (other.input, other.output):
                names[:] = [new if t == old else t for t in names]
        for value in model.graph.output:
            value.name = new if value.name == old else value.name


def _operator(model: onnx.ModelProto, node: onnx.NodeProto, rng: random.Random) -> None:
    """Replace operators, so that inputs and attributes do not match."""
    for other in rng.choices(model.graph.node, k=rng.choice((1, 3))):
        other.op_type = rng.choice(_OPERATORS)


def _stated(model: onnx.ModelProto, node: onnx.NodeProto, rng: random.Random) -> None:
    """Add stated types that contradict the nodes, by their rank or by impossible dimensions."""
    outputs = [t for n in model.graph.node for t in n.output if isinstance(t, str) and t]
    for name in rng.choices(outputs, k=rng.choice((1, 5, 50))) if outputs else ():
        rank = rng.choice((0, 0, 1, 1, 2, 4, 5))
        dims = [rng.choice((0, 1, 2, 8, 8, 64, -1, 1 << 31, "n", None)) for _ in range(rank)]
        kind = rng.choice(
            (TensorProto.FLOAT, TensorProto.INT8, TensorProto.INT64, TensorProto.FLOAT16, 0)
        )
        model.graph.value_info.append(helper.make_tensor_value_info(name, kind, dims))


_OPERATORS = sorted({s.name for s in onnx.defs.get_all_schemas() if s.domain == ""})
_DAMAGE = (
    _opset,
    _types,
    _inputs,
    _bomb,
    _quantizer,
    _attribute,
    _calls,
    _einsum,
    _long_name,
    _operator,
    _stated,
)
# Paths that are not images: `pipe` and `loop` are next to the list; the others are folders, devices
# and files of the kernel.
_SPECIAL = (
    b"pipe",
    b"loop",
    b".",
    b"..",
    b"/dev/zero",
    b"/dev/stdin",
    b"/proc/self/mem",
    b"/proc/self/fd/0",
    b"pipe\nloop",
)


def _large_picture(kind: str, rng: random.Random) -> bytes:
    """Return a file of kilobytes whose image has tens of megabytes."""
    size = rng.choice(
        ((1, 20_000), (60_000, 40), (3000, 3000), (7900, 7900), (9000, 9000), (70_000, 1))
    )
    jpeg = kind.endswith("jpg")
    if jpeg and rng.random() < 0.3:
        return jpeg_in_scans(
            min(size[0], 9000), min(size[1], 9000), rng.choice((1, 3)), rng.random() < 0.3
        )
    image = Image.new(
        rng.choice(("L", "RGB", "CMYK") if jpeg else ("1", "L", "P")),
        size if not jpeg else (min(size[0], 5000), min(size[1], 5000)),
    )
    out = io.BytesIO()
    image.save(out, "JPEG" if jpeg else "PNG", progressive=rng.random() < 0.3)
    return out.getvalue()


_VALUES = (
    None,
    True,
    -1,
    0,
    1 << 70,
    10**400,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "\x1b[31m\x85",
    "</script><b>",
    "9" * 5000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    "a" * 70_000,
    "\ud800",
    1e-320,
)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(data, rng)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, key = [whole], 0
        while rng.random() < 0.85:
            inner = at[key]
            if not isinstance(inner, dict | list) or not inner:
                break
            at, key = (
                inner,
                rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner))),
            )
        kind = rng.randrange(4)
        if kind == 0 and isinstance(at, dict):
            del at[key]
        elif kind == 1 and isinstance(at, list) and at[0] is not whole:
            at += copy.deepcopy([at[key]] * rng.choice((1, 3000)))
        elif at != [whole]:
            at[key] = copy.deepcopy(rng.choice(_VALUES))
    text = io.StringIO()
    for piece in json.JSONEncoder().iterencode(
        whole
    ):  # stop early, because lists may be copied 3000 times at several levels
        if text.write(piece) and text.tell() > MAX_BYTES:
            break
    return text.getvalue().encode()


def _inside(data: bytes, kind: str, rng: random.Random) -> bytes:
    """Damage the content of a compressed file."""
    try:
        plain = gzip.decompress(data)
    except Exception:
        return _bytes(data, rng)
    plain = _model(plain, rng) if kind.endswith(".onnx.gz") else mutate_json(plain, rng)
    return gzip.compress(plain, 1, mtime=0)


def _archive(data: bytes, rng: random.Random) -> bytes:
    """Return an archive with a damaged, renamed or missing member."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(n, archive.read(n)) for n in archive.namelist()]
    except Exception:
        return _bytes(data, rng)
    out = io.BytesIO()
    warnings.filterwarnings("ignore", "Duplicate name")
    with zipfile.ZipFile(
        out,
        "w",
        rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)),
    ) as archive:
        for name, content in members:
            kind = rng.randrange(8)
            if kind == 0:
                content = _bytes(content, rng) if content else content
            elif kind == 1:
                content = content.replace(
                    rng.choice((b"<f4", b"<i8", b"|u1", b"(3,")),
                    rng.choice(
                        (
                            b"|O8",
                            b"<f8",
                            b"|S0",
                            b"|V2",
                            b"(9999999999,",
                            b"(-1,",
                            b"(0,",
                            b"('<f4',(2,))",
                        )
                    ),
                )
            elif kind == 2:
                name = rng.choice(("\x1b[31m.npy", "x.npy", "../x.npy", "header.npy"))
            elif kind == 3:
                continue
            elif kind == 4:
                content = content.replace(b'"', rng.choice((b"", b"'", b"[")), 3)
            elif kind == 5:
                content = content[: len(content) // 2]
            archive.writestr(name, content)
    return out.getvalue()


def hostile_tensor(model: onnx.ModelProto, number: int) -> None:
    tensors = model.graph.initializer
    if tensors:
        tensor = tensors[number % len(tensors)]
        odd = (
            TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[1 << 40, 1 << 40]),
            TensorProto(name=tensor.name, data_type=99, dims=tensor.dims),
            numpy_helper.from_array(np.full((1,), np.nan, np.float32), tensor.name),
            helper.make_tensor(tensor.name, TensorProto.FLOAT, [0], []),
            TensorProto(name=tensor.name, data_type=TensorProto.FLOAT, dims=[-1]),
        )
        tensor.CopyFrom(odd[number % len(odd)])


def jpeg_in_scans(width: int, height: int, times: int, together: bool = False) -> bytes:
    """Return a gray JPEG of three components, in separate scans or together, with a thumbnail."""
    packed = io.BytesIO()
    Image.new("L", (8, 8)).save(packed, "JPEG")
    data = packed.getvalue()
    tables = b""
    place = 2
    while (marker := data[place : place + 2]) != b"\xff\xda":
        end = place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        tables += data[place:end] if marker in (b"\xff\xdb", b"\xff\xc4") else b""
        place = end

    def segment(marker: int, *content: int) -> bytes:
        return bytes([0xFF, marker, 0, 2 + len(content), *content])

    size = (*height.to_bytes(2), *width.to_bytes(2))
    frame = segment(0xC0, 8, *size, 3, *(n for c in (1, 2, 3) for n in (c, 0x11, 0)))
    blocks = math.ceil(width / 8) * math.ceil(height / 8)
    scans = [((1, 2, 3),)] if together else [((1,), (2,), (3,))] * times
    jpeg = (
        b"\xff\xd8" + segment(0xE1, 0xFF, 0xD8, 0xFF, 0xDA, 0xFF, 0xD9) + b"\xff" + tables + frame
    )
    for components in (c for turn in scans for c in turn):
        bits = "001010" * blocks * len(components)  # a difference of 0, and the end of the block
        bits += "1" * (-len(bits) % 8)
        jpeg += segment(0xDA, len(components), *(n for c in components for n in (c, 0)), 0, 63, 0)
        jpeg += int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    return jpeg + b"\xff\xd9"
