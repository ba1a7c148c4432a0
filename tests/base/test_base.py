"""Records, patterns and late imports."""

import ast
import copy
import dataclasses
import importlib
import importlib.util
import itertools
import pickle
import pkgutil
import re
import re._constants as sre
import re._parser as parser
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import calibration
import qdqtool
from qdqtool.base.records import contents, record, replaced
from qdqtool.base.text import reason_of
from qdqtool.buildlog.names import base_name, parts
from qdqtool.explain.errors import _MAX_MESSAGE
from tests.sources import nodes_like
from tests.tables import in_turn

# Records: a frozen dataclass's behaviour, compared with one.

@record
class Base:
    reason: ClassVar[str] = "base"
    name: str
    size: int = 3


@record
class Part(Base):
    reason: ClassVar[str] = "part"
    last: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Known:
    name: str
    size: int = 3
    last: tuple[int, ...] = ()


@in_turn(("args", "named"), [
    (("a",), {}), (("a", 1, (2,)), {}), ((), {"last": (1,), "name": "b"}), (("a", 4), {"last": ()}),
])  # fmt: skip
def test_a_record_holds_what_a_dataclass_holds(args: tuple[object, ...], named: dict[str, object]) -> None:
    ours, known = Part(*args, **named), Known(*args, **named)  # type: ignore[arg-type]
    assert contents(ours) == dataclasses.astuple(known)
    assert repr(ours) == repr(known).replace("test_records.", "").replace("Known", "Part")
    assert ours == Part(*args, **named) and hash(ours) == hash(Part(*args, **named))  # type: ignore[arg-type]
    assert ours != Base(ours.name, ours.size) and ours != replaced(ours, size=99)
    assert replaced(ours, size=99) == Part(ours.name, 99, ours.last)
    assert pickle.loads(pickle.dumps(ours)) == ours == copy.deepcopy(ours)


@in_turn(("args", "named"), [
    ((), {}), (("a", 1, (), 2), {}), (("a",), {"name": "b"}), (("a",), {"other": 1}), (("a",), {"reason": "x"}),
])  # fmt: skip
def test_what_a_dataclass_refuses_a_record_refuses(args: tuple[object, ...], named: dict[str, object]) -> None:
    for kind in (Known, Part):
        with pytest.raises(TypeError):
            kind(*args, **named)  # type: ignore[call-arg]


def test_a_record_cannot_be_changed() -> None:
    made = Part("a")
    with pytest.raises(AttributeError):
        made.name = "b"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        del made.size
    assert contents(made) == ("a", 3, ())


# Every regular expression of the program, fed with much of what is worst for it.

SIZE = 1 << 14
SECONDS = 0.05  # of processor time; a quadratic one takes minutes
METHODS = ("match", "fullmatch", "search", "finditer", "findall", "sub", "split")
ROOT = Path(qdqtool.__file__).parent.parent


def modules() -> Iterator[str]:
    for package in (qdqtool, calibration):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith(("__main__", ".worker")):
                yield found.name


def compiled() -> dict[str, tuple[re.Pattern[Any], set[str]]]:
    """Patterns by where they are, with the methods that are called on them."""
    found: dict[str, tuple[re.Pattern[Any], set[str]]] = {}
    for name in modules():
        known: dict[str, list[re.Pattern[Any]]] = {}
        if name.startswith("qdqtool.qat."):  # takes seconds to import, with libraries for training
            spec = importlib.util.find_spec(name)
            assert spec is not None
            source = (path := Path(str(spec.origin))).read_text()
            assert "re.compile" not in source, f"{name} is read and not imported: give re the pattern where it is used"
        else:
            try:
                module = importlib.import_module(name)
            except ImportError:  # an optional part, whose library is missing
                continue
            known = {label: patterns for label, value in vars(module).items() if (patterns := [*_patterns(value)])}
            source = (path := Path(str(module.__file__))).read_text()
        used: dict[str, set[str]] = {}
        for node in nodes_like(path, ast.Attribute, ast.Call) if known or re.search(r"\bre\.", source) else ():
            if isinstance(node, ast.Attribute) and node.attr in METHODS and isinstance(node.value, ast.Name):
                used.setdefault(node.value.id, set()).add(node.attr)
            if (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
                and isinstance(node.func.value, ast.Name) and node.func.value.id == "re" and node.func.attr in METHODS
                and isinstance(node.args[0], ast.Constant)
            ):
                found[f"{name}:{node.lineno}"] = re.compile(node.args[0].value), {node.func.attr}
        for label, patterns in known.items():
            for number, pattern in enumerate(patterns):
                found[f"{name}.{label}[{number}]"] = pattern, used.get(label, {"search"})
    return found


def _patterns(value: object) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _patterns(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _patterns(item)


def _text(items: Any) -> str:
    """A text that a sequence of a parsed pattern matches."""
    out = ""
    for op, argument in items:
        if op in (sre.LITERAL, sre.NOT_LITERAL):
            out += chr(argument) if op is sre.LITERAL else "~"
        elif op is sre.ANY:
            out += "a"
        elif op is sre.IN:
            out += _member(argument)
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, _, inner = argument
            out += _text(inner) * max(1, low)
        elif op is sre.SUBPATTERN:
            out += _text(argument[-1])
        elif op is sre.BRANCH:
            out += _text(argument[1][0])
    return out


def _member(choices: Any) -> str:
    for op, argument in choices:
        if op is sre.LITERAL:
            return chr(argument)
        if op is sre.RANGE:
            return chr(argument[0])
        if op is sre.CATEGORY:
            return {sre.CATEGORY_DIGIT: "1", sre.CATEGORY_SPACE: " "}.get(argument, "a")
        if op is sre.NEGATE:
            return next(c for c in "a1 ~\"'" if not any(o is sre.LITERAL and chr(a) == c for o, a in choices[1:]))
    return "a"


def _pieces(items: Any) -> list[list[Any]]:
    """The items of a sequence, neighbouring letters as one."""
    grouped: list[list[Any]] = []
    for item in items:
        if item[0] is sre.LITERAL and grouped and grouped[-1][-1][0] is sre.LITERAL:
            grouped[-1].append(item)
        else:
            grouped.append([item])
    return grouped


def worst(items: Any) -> Iterator[str]:
    """Texts that begin as the pattern does and then say one part of it over and over, but never its end."""
    pieces = _pieces(items)
    for first, last in itertools.combinations(range(min(len(pieces), 9) + 1), 2):
        unit = _text([i for piece in pieces[first:last] for i in piece])
        if unit:
            begin = _text([i for piece in pieces[:first] for i in piece])
            yield begin + unit * (SIZE // len(unit)) + "\x00"
            yield begin + unit * (SIZE // len(unit))
    for op, argument in items:
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            yield from worst(argument[2])
        elif op is sre.SUBPATTERN:
            yield from worst(argument[-1])
        elif op is sre.BRANCH:
            for branch in argument[1]:
                yield from worst(branch)


class Slow(BaseException):
    """The time is over."""


def _end(*_: object) -> None:
    raise Slow


def slow_on(pattern: re.Pattern[Any], method: str, size: int = SIZE + 100) -> str:
    """The beginning of a text that takes too long; empty where none does."""
    texts = dict.fromkeys([*worst(parser.parse(pattern.pattern, pattern.flags)), "[" * SIZE, "(" * SIZE, " " * SIZE])
    before = signal.signal(signal.SIGVTALRM, _end)
    try:
        for text in texts:
            text = text[:size]
            given: Any = text.encode("utf-8", "replace") if isinstance(pattern.pattern, bytes) else text
            empty: Any = b"" if isinstance(given, bytes) else ""
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
            try:
                if method == "sub":
                    pattern.sub(empty, given)
                elif method == "finditer":
                    for _ in pattern.finditer(given):
                        pass
                else:
                    getattr(pattern, method)(given)
            except Slow:
                return text[:60]
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    return ""


@pytest.mark.skipif(not hasattr(signal, "ITIMER_VIRTUAL"), reason="no timer of processor time on this system")
def test_every_pattern_is_linear() -> None:
    patterns = compiled()
    assert len(patterns) > 60
    known_errors = "qdqtool.explain.errors"  # these are given so much of a text and no more
    slow = {f"{where} ({method})": text for where, (pattern, methods) in patterns.items() for method in methods
            if (text := slow_on(pattern, method, _MAX_MESSAGE if where.startswith(known_errors) else SIZE + 100))}
    assert not slow


def test_the_test_finds_quadratic_patterns() -> None:
    assert slow_on(re.compile(r"(?:_clone_\d+)+$"), "search")
    assert slow_on(re.compile(r"\x1b\][^\x07]*\x07"), "sub")
    assert not slow_on(re.compile(r"_clone_\d"), "search")


@in_turn("unit", ["_clone_1", "_clone_", "1", "_clone_11111111", "_"])
def test_suffixes_of_long_names(unit: str) -> None:
    name = "x" + unit * (SIZE // len(unit)) + "x"
    begun = time.process_time()
    assert base_name(name) == name
    parts(name)
    assert time.process_time() - begun < SECONDS


def test_suffixes_exceptions_and_late_imports() -> None:
    assert base_name("a_clone_1_clone_20") == "a"
    assert (base_name("a_clone_1b"), base_name("_clone_")) == ("a_clone_1b", "_clone_")
    assert base_name("a_clone_1_quantize_scale_node_clone_2") == "a"
    assert reason_of(ValueError("a\n b")) == "a b" and reason_of(ValueError()) == "ValueError"
    assert reason_of(ValueError("x" * 300)) == "x" * 200 and reason_of(ValueError("xyz"), 2) == "xy"
    assert reason_of(ValueError("\n first\nsecond"), first_line=True) == "first"
    assert reason_of(ValueError(" \n"), first_line=True) == "ValueError"
    for text in (_BEHAVES, _FAILS):
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


# The command line's own onnx: its classes are onnx's, whatever is asked for later is all of it.

_BEHAVES = """
import sys
from qdqtool.base.deferred import defer
defer()
import onnx
made = onnx.ModelProto(ir_version=8)
assert "onnx.helper" not in sys.modules and "onnx.serialization" not in sys.modules
from onnx import helper, TensorProto
assert helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]).name == "x"
assert "onnx.serialization" not in sys.modules
assert onnx.load_model_from_string(made.SerializeToString()) == made
assert type(onnx).__name__ == "module" and "onnx.serialization" in sys.modules
assert type(made) is onnx.ModelProto is sys.modules["onnx.onnx_ml_pb2"].ModelProto
assert not hasattr(onnx, "nothing")
defer()
assert sys.modules["onnx"] is onnx
"""
_FAILS = """
import sys
from qdqtool.base.deferred import defer
defer()
import onnx
sys.modules["onnx.serialization"] = None
try:
    onnx.load
except ImportError:
    assert "onnx" not in sys.modules
else:
    raise AssertionError("imported")
"""


def test_a_copy_of_a_record_works_out_its_own_hash():
    """In another process texts have others."""
    part = Part("a", last=(1, 2))
    assert hash(part) == hash(Part("a", last=(1, 2))) and "_hash" in vars(part)
    for again in (copy.copy(part), pickle.loads(pickle.dumps(part))):
        assert again == part and "_hash" not in vars(again)
