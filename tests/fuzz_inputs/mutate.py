"""Damage of every kind: to the bytes of any file, and to the structure of models, archives and JSON."""

from __future__ import annotations

import copy
import gzip
import io
import json
import random
import warnings
import zipfile

import onnx

from tests.fuzz_inputs.seeds import hostile_tensor
from tests.fuzz_logs.mutate import MUTATIONS as TEXT

_WORDS = (b"\x1b]0;owned\x07", b"\x9b31m", b"\xff\xfe\xff", b"\0", b"\xc2\x85", b"../../x", b"/etc/hostname", b"9" * 30,
          b"-1", b"nan", b"", b"\n", b"a" * 70_000, b"\x80" * 10, b"{'descr': '|O'", b"e\xcc\x81")


def mutated(data: bytes, kind: str, rng: random.Random) -> bytes:
    """One to three mutations of a file."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not data:
            break
        choice = rng.random()
        if kind.endswith(".onnx") and choice < 0.6:
            data = _model(data, rng)
        elif kind.endswith((".gz", ".tuning")) and choice < 0.7:
            data = _inside(data, kind, rng)
        elif kind.endswith(".npz") and choice < 0.5:
            data = _archive(data, rng)
        elif kind.endswith(".json") and choice < 0.5:
            data = _json(data, rng)
        elif kind.endswith((".log", ".json", ".txt", ".cache")) and choice < 0.7:
            data = rng.choice(TEXT)(data, rng)
        else:
            data = _bytes(data, rng)
        data = data[: 8 << 20]
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
        return data[:at] + data[at + rng.randrange(1, 50):]
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
    kind = rng.randrange(10)
    if kind == 0 and node.input:
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
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice((0, -1, 1 << 31, 1 << 62))
    elif kind == 7:
        node.name = rng.choice(("\x1b[31m", "\x85\u202e", "a" * 50_000, "_clone_1" * 5000, "a\nb", ""))
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


_VALUES = (None, True, -1, 0, 1 << 70, 10**400, -1e308, float("nan"), float("inf"), "", "\x1b[31m\x85",
           "</script><b>", "9" * 5000, [], {}, [[]], [None], {"": None}, "a" * 70_000, "\ud800", 1e-320)


def _json(data: bytes, rng: random.Random) -> bytes:
    """The same JSON with values replaced, doubled, or taken away."""
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
            at, key = inner, rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        kind = rng.randrange(4)
        if kind == 0 and isinstance(at, dict):
            del at[key]
        elif kind == 1 and isinstance(at, list) and at[0] is not whole:
            at += copy.deepcopy([at[key]] * rng.choice((1, 3000)))
        elif at != [whole]:
            at[key] = copy.deepcopy(rng.choice(_VALUES))
    return json.dumps(whole).encode()


def _inside(data: bytes, kind: str, rng: random.Random) -> bytes:
    """What is packed, damaged and packed again."""
    try:
        plain = gzip.decompress(data)
    except Exception:
        return _bytes(data, rng)
    plain = _model(plain, rng) if kind.endswith(".onnx.gz") else _json(plain, rng)
    return gzip.compress(plain, 1, mtime=0)


def _archive(data: bytes, rng: random.Random) -> bytes:
    """The archive packed again, with a member damaged, renamed, doubled, or packed otherwise."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(n, archive.read(n)) for n in archive.namelist()]
    except Exception:
        return _bytes(data, rng)
    out = io.BytesIO()
    warnings.filterwarnings("ignore", "Duplicate name")
    with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2,
                                               zipfile.ZIP_LZMA))) as archive:
        for name, content in members:
            kind = rng.randrange(8)
            if kind == 0:
                content = _bytes(content, rng) if content else content
            elif kind == 1:
                content = content.replace(rng.choice((b"<f4", b"<i8", b"|u1", b"(3,")), rng.choice(
                    (b"|O8", b"<f8", b"|S0", b"|V2", b"(9999999999,", b"(-1,", b"(0,", b"('<f4',(2,))")))
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
