"""The house keeps its order: rooms import downward only, nothing goes in circles, passes can be read alone.

Imports are read from the source: those inside functions count like those on top, and those for type checkers alone
count too (a room that only names a type of the room above knows of it all the same).
"""

from __future__ import annotations

import ast
import functools
import re
import typing
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import click
import onnx.defs
import pytest

from qdqtool.commands.cli import cli
from qdqtool.types import FindingCode
from tests.sources import (
    SAID,
    circles,
    functions_of,
    lines_that_edit,
    lines_that_read,
    nodes_like,
    nodes_of,
)

HOME = Path(__file__).parents[1]
PACKAGES = ("qdqtool", "calibration")

# The picture says who may import whom: a room those of lower floors, and of its own as long as nothing makes a circle.
_PICTURE = (HOME / "docs" / "architecture.md").read_text(encoding="utf-8")
FLOORS = tuple(
    tuple(re.findall(r"\w+", " ".join(re.findall(r"^. (.*?),?(?:  .*)?$", floor, re.M))))
    for floor in re.findall(r"^[┌├] .*(?:\n[│└] .*)*", _PICTURE, re.M)
)
FLOOR = {room: i for i, floor in enumerate(FLOORS) for room in floor}
# All that calibration may know of qdqtool.
FOR_CALIBRATION = {"base", "errors", "model", "types"}
# Where one fact per operator comes from operators.py; trt/rtx is another compiler, with rules of its own.
READ_OPERATORS = ("trt", "insertion", "fixing", "explain", "prediction")
OTHER_COMPILER = "qdqtool.trt.rtx"
LINT = "qdqtool.explain.lint"

# Who may change a graph beside model, and which: a candidate's own copy, what onnx's converter made, an export before
# it is a model, a part that was just made, a network made from nothing.
EDITORS = {
    "qdqtool.extraction.moves": "*",
    "qdqtool.insertion.prepare": "raise_opset",
    "qdqtool.qat.trace": "drop_marks",
    "qdqtool.extraction.cut": "_cut",
    "calibration.session": "partial_model",
    "qdqtool.commands.demo_run": "finish",
}

# Where words of results are read: tests of the words themselves, or where they are somebody else's.
OF_WORDS = (
    "tests/render/",
    "tests/explain/test_wording.py",
    "tests/test_agreement_of_findings.py",
    "tests/builders/test_tensorrt.py",  # messages of a compiler
    "tests/buildlog/test_read.py",  # warnings in a log
)

# Where a finding's message is shown, and what has another one: builds, and a process that was stopped.
SHOWN = (
    "qdqtool.render.",
    "qdqtool.extraction.result",
    "qdqtool.testing",
    "qdqtool.verification.comparing.api",
)
OTHER_MESSAGES = {
    "qdqtool.builders.run": ("result",),
    "qdqtool.commands.build": ("result",),
    "qdqtool.verification.api": ("result",),
    "qdqtool.extraction.checks": ("self", "other", "self.whole", "built"),
    "qdqtool.commands.cli": ("stop", "process.Stopped(process.INTERRUPTED)"),
}

# Where backticks are Markdown's, are made for a parameter, or quote a compiler.
OF_BACKTICKS = (
    "qdqtool.base.said",
    "qdqtool.extraction.result",
    "qdqtool.explain.messages_rtx",
    "qdqtool.trt.passes.quantize_double_input_nodes",
)

TRTEXEC = {"--", "--calib", "--help", "--profile", "--shapes"}  # options of its as well as of ours

# What does not hold yet. Only ever to be shortened: an entry that holds fails the test.
_NOT_YET: frozenset[str] = frozenset()


# Reading ----------------------------------------------------------------------------------------------------------


@functools.cache
def sources() -> dict[str, Path]:
    """Module to file, of all that is installed."""
    found = {}
    for package in PACKAGES:
        for path in sorted((HOME / package).rglob("*.py")):
            parts = path.relative_to(HOME).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(nodes: Iterable[ast.AST], modules: Iterable[str]) -> Iterator[str]:
    """Modules of ``modules`` that a source imports anywhere; ``from package import name`` counts as package.name."""
    known = set(modules)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known:
                    yield inner
                elif node.module in known:
                    yield node.module


@functools.cache
def graph() -> dict[str, frozenset[str]]:
    """Module to the modules that it imports."""
    modules = sources()
    imports = {m: nodes_like(path, ast.Import, ast.ImportFrom) for m, path in modules.items()}
    return {m: frozenset(imported(nodes, modules)) - {m} for m, nodes in imports.items()}


def room_of(module: str) -> str:
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == "qdqtool" and rest else first


def rooms(edges: dict[str, frozenset[str]]) -> dict[str, set[str]]:
    """Room to the other rooms that it imports."""
    found: dict[str, set[str]] = {}
    for module, targets in edges.items():
        room = room_of(module)
        found.setdefault(room, set()).update(room_of(t) for t in targets)
    return {room: targets - {room} for room, targets in found.items()}


# Laws: each gives (what is broken, where) -------------------------------------------------------------------------

Broken = Iterator[tuple[str, str]]


def undeclared() -> Broken:
    for module in sources():
        if room_of(module) not in FLOOR:
            yield f"no floor: {room_of(module)}", module
    for room in FLOOR.keys() - {room_of(module) for module in sources()}:
        yield f"no such room: {room}", "docs/architecture.md"


def upward() -> Broken:
    for module, targets in graph().items():
        for target in targets:
            here, there = room_of(module), room_of(target)
            if here in FLOOR and there in FLOOR and FLOOR[there] < FLOOR[here]:
                yield f"upward: {here} -> {there}", f"{module} imports {target}"


def circles_of_rooms() -> Broken:
    for group in circles({k: frozenset(v) for k, v in rooms(graph()).items()}):
        edges = [
            f"{m} imports {t}"
            for m, ts in graph().items()
            for t in ts
            if room_of(m) != room_of(t) and {room_of(m), room_of(t)} <= set(group)
        ]
        yield f"circle of rooms: {', '.join(group)}", "; ".join(edges)


def circles_of_modules() -> Broken:
    for group in circles(dict(graph())):
        yield f"circle of modules: {', '.join(group)}", ""


def calibration_knows_too_much() -> Broken:
    for module, targets in graph().items():
        for target in targets:
            if room_of(module) == "calibration" and target.startswith("qdqtool"):
                if room_of(target) not in FOR_CALIBRATION:
                    yield f"calibration -> {room_of(target)}", f"{module} imports {target}"


def passes_that_need_another() -> Broken:
    home = "qdqtool.trt.passes"
    for module, targets in graph().items():
        if module.startswith(f"{home}."):
            for target in targets:
                name = target.removeprefix(f"{home}.")
                if target.startswith(f"{home}.") and name != "_infra":
                    yield f"pass: {module.removeprefix(f'{home}.')} -> {name}", ""


def versions_compared() -> Broken:
    """Rules that differ by version read the properties of a target; only the table of targets knows versions."""
    for module, path in sources().items():
        if module == "qdqtool.trt.targets":
            continue
        for node in nodes_like(path, ast.Compare):
            if any(
                isinstance(part, ast.Attribute) and part.attr == "version"
                for side in (node.left, *node.comparators)
                for part in ast.walk(side)
            ):
                yield f"version: {module}", f"{path.relative_to(HOME)}:{node.lineno}"


def targets_named() -> Broken:
    """Neither is a target compared by its name, or by how that begins; the codes of explain say where they hold."""
    named = re.compile(r"trt\d+(\.\d+)?|rtx\d*(\.\d+)?")
    for module, path in sources().items():
        if module == "qdqtool.trt.targets" or (
            room_of(module) == "explain" and not module.startswith(LINT)
        ):
            continue
        for node in nodes_like(path, ast.Compare, ast.Call, ast.Assign):
            looked: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                looked = [node.left, *node.comparators]
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "startswith"
            ):
                looked = node.args
            elif not isinstance(node, ast.Assign):
                continue
            texts = [
                part.value
                for side in looked
                for part in ast.walk(side)
                if isinstance(part, ast.Constant)
            ]
            if any(isinstance(text, str) and named.fullmatch(text) for text in texts):
                yield f"target: {module}", f"{path.relative_to(HOME)}:{node.lineno}"
            if isinstance(node, ast.Assign):
                parts = (
                    node.value.elts
                    if isinstance(node.value, (ast.Tuple, ast.List, ast.Set))
                    else []
                )
                if any(
                    isinstance(p, ast.Constant) and named.fullmatch(str(p.value)) for p in parts
                ):
                    yield f"target: {module}", f"{path.relative_to(HOME)}:{node.lineno}"


def lists_of_operators() -> Broken:
    """Operators side by side are a class of operators, and classes of operators have one home.

    What a case is about is none: it says which lines of a log show the case.
    """
    names = {s.name for s in onnx.defs.get_all_schemas()} - {"QuantizeLinear", "DequantizeLinear"}
    for module, path in sources().items():
        if room_of(module) not in READ_OPERATORS or module.startswith(OTHER_COMPILER):
            continue
        about = {id(node.value) for node in nodes_like(path, ast.keyword) if node.arg == "about"}
        for node in nodes_like(path, ast.Tuple, ast.List, ast.Set):
            if id(node) not in about:
                found = [
                    e.value for e in node.elts if isinstance(e, ast.Constant) and e.value in names
                ]
                if len(found) >= 2:
                    yield (
                        f"operators: {module}",
                        f"{path.relative_to(HOME)}:{node.lineno}: {', '.join(found)}",
                    )


# What stands side by side once, and where.
ONCE = {
    ("'ai.onnx'",): "qdqtool.model.subgraphs",
    ("TensorProto.FLOAT", "TensorProto.FLOAT16"): "qdqtool.model.qdq",
    ("LayerKind.CONVOLUTION", "LayerKind.DECONVOLUTION"): "qdqtool.model.operators",
    ("Precision.INT8", "Precision.UINT8"): "qdqtool.types",
}


def lists_with_one_home() -> Broken:
    """Domains, types and kinds of layers."""
    for module, path in sources().items():
        for node in nodes_like(path, ast.Tuple, ast.List, ast.Set):
            listed = {ast.unparse(e).removeprefix("onnx.") for e in node.elts}
            for names, home in ONCE.items():
                if module != home and listed.issuperset(names):
                    yield f"{' '.join(names)}: {module}", f"{path.relative_to(HOME)}:{node.lineno}"


def onnx_loaded() -> Broken:
    """What ``predict`` loads takes messages alone from onnx when it is loaded (base/deferred.py): its helpers bring
    along packages that take a twentieth of a prediction."""
    for module, path in sources().items():
        if (
            room_of(module) in ("explain", "model", "prediction", "trt")
            and module != "qdqtool.model.run_cost"
        ):
            for node in nodes_of(path)[0].body:  # type: ignore[attr-defined]
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("onnx"):
                    yield from (
                        (f"onnx: {module}", a.name)
                        for a in node.names
                        if not a.name.endswith("Proto")
                    )


def onnxruntime_loaded() -> Broken:
    """It leaves a file behind where it is not loaded by base/deferred.py, or by a process with such an environment."""
    for module, path in sources().items():
        if module not in ("qdqtool.model.sessions", "qdqtool.fixing.worker"):
            for node in nodes_like(path, ast.Import, ast.ImportFrom):
                names = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else [str(node.module)]
                )
                if any(name.partition(".")[0] == "onnxruntime" for name in names):
                    yield f"onnxruntime: {module}", f"{path.relative_to(HOME)}:{node.lineno}"


def docstrings(path: Path) -> set[int]:
    firsts = (
        n.body[0] for n in nodes_like(path, ast.Module, ast.ClassDef, ast.FunctionDef) if n.body
    )
    return {id(first.value) for first in firsts if isinstance(first, ast.Expr)}


def words_of_the_command_line() -> Broken:
    """Errors and notes hold a parameter as a value; the command line makes an option of it (render/output.py).

    Options that trtexec has as well are its words; so are all in explain, which speaks of command lines to type.
    """
    context = click.Context(cli)
    commands = [
        c
        for c in (cli.get_command(context, name) for name in cli.list_commands(context))
        if c is not None
    ]
    known = {
        o
        for c in commands
        for p in c.params
        for o in (*p.opts, *p.secondary_opts)
        if o.startswith("--")
    }
    either = "|".join(sorted(known - TRTEXEC))
    options = re.compile(rf"(?<![\w-])(?:{either})(?![\w-])")
    for module, path in sources().items():
        speaks_of_commands = room_of(module) in ("commands", "render", "explain")
        speaks_of_commands &= not module.startswith((LINT, "qdqtool.render.reporting"))
        if speaks_of_commands or module.endswith(".options"):
            continue
        docs = docstrings(path)
        for node in nodes_like(path, ast.Constant):
            if isinstance(node.value, str) and id(node) not in docs:
                # 'qdqtool verify --format json' names a whole command, as one who types it would.
                for found in options.finditer(
                    re.sub(r"qdqtool [a-z]+ --[^']*|qdqtool verify .*", "", node.value)
                ):
                    yield (
                        f"command line: {module}",
                        f"{path.relative_to(HOME)}:{node.lineno}: {found[0]}",
                    )


def graphs_edited() -> Broken:
    """Nodes, constants and ends are put into a graph, taken out of it and tied otherwise by ``model`` alone."""
    left = {f"{module}.{function}" for module, function in EDITORS.items()}
    functions = {module: nodes_like(path, ast.FunctionDef) for module, path in sources().items()}
    others = {
        module: list(nodes) for module, nodes in functions.items() if room_of(module) != "model"
    }
    known = functions_of(node for nodes in others.values() for node in nodes)
    for module, path in sources().items():
        if module in others:
            for function, line in lines_that_edit(others[module], known):
                allowed = f"{module}.{EDITORS.get(module)}"
                left.discard(allowed)
                if allowed not in (f"{module}.*", f"{module}.{function}"):
                    yield f"graph: {module}", f"{path.relative_to(HOME)}:{line}"
    for name in left:
        yield f"edits no graph: {name}", "EDITORS"


def sentences_read() -> Broken:
    """A note, a finding or a change is asked for its remark, code and values, not for its words (base/notes.py)."""
    ours = dict.fromkeys(sources().values())
    for path in (*ours, *sorted((HOME / "tests").rglob("*.py"))):
        name = str(path.relative_to(HOME))
        if not name.startswith(OF_WORDS):
            found = lines_that_read(
                path.read_text(encoding="utf-8"), nodes_of(path) if path in ours else None
            )
            yield from ((f"words: {name}", str(line)) for line in found)


def messages_read() -> Broken:
    """A finding's message is shown, and read for nothing else."""
    for module, path in sources().items():
        if module.startswith(SHOWN):
            continue
        for node in nodes_like(path, ast.Attribute, ast.Call):
            read = (
                isinstance(node, ast.Attribute)
                and node.attr == "message"
                and ast.unparse(node.value)
            )
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("getattr", "attrgetter")
            ):
                read = any(
                    isinstance(arg, ast.Constant) and arg.value == "message" for arg in node.args
                )
            if read and read not in OTHER_MESSAGES.get(module, ()):
                yield f"message: {module}", f"{path.relative_to(HOME)}:{node.lineno}"


def words_compared() -> Broken:
    """A finding's words are asked for where it is worded; an error's path is no text to cut off (errors.py)."""
    for module, path in sources().items():
        for node in nodes_like(path, ast.ImportFrom, ast.Call):
            named = isinstance(node, ast.ImportFrom) and node.module == "qdqtool.explain.messages"
            if named and any(a.name == "worded" for a in node.names):
                yield f"words: {module}", f"{path.relative_to(HOME)}:{node.lineno}"
            if cuts_an_error(node):
                yield f"error: {module}", f"{path.relative_to(HOME)}:{node.lineno}"


# Where words stand: all others of explain make records.
OF_FINDINGS = ("codes", "errors", "left_float", "lines", "messages", "ways")


def words_elsewhere() -> Broken:
    """What says what a model lacks makes records, of which one room makes words at the end (explain/messages*.py)."""
    records = re.compile(
        rf"qdqtool\.(trt\.(detect|faults|refusals)|explain\.(?!{'|'.join(OF_FINDINGS)}).*)"
    )
    for module, path in sources().items():
        if records.fullmatch(module):
            notes = {id(node.value) for node in nodes_like(path, ast.Expr)}
            for node in nodes_like(path, ast.Constant):
                if id(node) not in notes and re.search(r"[a-z]{2} [a-z]{2}", str(node.value)):
                    yield f"words: {module}", f"{path.relative_to(HOME)}:{node.lineno}"


def parameters_in_words() -> Broken:
    """A sentence holds a parameter as a value, ``{`clock`}``, which each reader is told its way (base/said.py)."""
    for module, path in sources().items():
        docs = docstrings(path)
        for node in nodes_like(path, ast.Constant, ast.JoinedStr):
            if module not in OF_BACKTICKS and id(node) not in docs and names_a_parameter(node):
                yield f"parameter: {module}", f"{path.relative_to(HOME)}:{node.lineno}"


def names_a_parameter(node: ast.AST) -> bool:
    """Whether a text has a name in backticks, or an f-string puts something between them."""
    if isinstance(node, ast.JoinedStr):
        opened = [
            isinstance(part, ast.Constant) and str(part.value).endswith("`") for part in node.values
        ]
        return any(opened[:-1])
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (re.search(r"(?<![`{])`[a-z][a-z_]*(?:=[^`]*)?`(?!`)", node.value) is not None)
    )


def codes_named() -> Broken:
    """The class of a refusal gives its code (explain/coded.py); what is below findings, and ``fix``, name none but in docstrings."""
    code = re.compile(
        rf"(?<![\w-])(?:{'|'.join(c for c in typing.get_args(FindingCode) if '-' in c)})(?![\w-])"
    )
    for module, path in sources().items():
        if room_of(module) not in ("commands", "explain", "render", "types"):
            documentation = docstrings(path)
            for node in nodes_like(path, ast.Constant):
                if id(node) not in documentation and code.search(str(node.value)):
                    yield f"code: {module}", f"{path.relative_to(HOME)}:{node.lineno}"


def sentences_as_values() -> Broken:
    """A remark or a sentence holds values, and what an error says as one (``of_error``): no text made before."""
    for module, path in sources().items():
        made = {
            ast.unparse(n.targets[0]) for n in nodes_like(path, ast.Assign) if makes_a_text(n.value)
        }
        for node in nodes_like(path, ast.Assign, ast.Call):
            if makes_a_sentence(node, made):
                yield f"value: {module}", f"{path.relative_to(HOME)}:{node.lineno}"


def makes_a_text(node: ast.expr) -> bool:
    """Whether a variable is given an f-string with words, or several of them."""
    parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
    parts = [p.elt if isinstance(p, ast.ListComp) else p for p in parts]
    parts += [e for p in parts if isinstance(p, ast.List) for e in p.elts]
    return any(
        isinstance(p, ast.JoinedStr)
        and re.search(
            r"[A-Za-z]{3}", "".join(str(v.value) for v in p.values if isinstance(v, ast.Constant))
        )
        for p in parts
    )


def makes_a_sentence(node: ast.AST, made: Collection[str] = ()) -> bool:
    """Whether a remark, a sentence or a reason is given an f-string or one of the texts ``made`` of such, or a remark
    the text of an error."""
    if isinstance(node, ast.Assign):
        named = any(isinstance(t, ast.Attribute) and t.attr in SAID for t in node.targets)
        return (
            named
            and isinstance(node.value, ast.JoinedStr | ast.Call)
            and ast.unparse(node.value) == "str(error)"
        )
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    remark = "Remark." in called or called == "remark"
    if not remark and called != "said":
        return False
    parts = [part for keyword in node.keywords for part in ast.walk(keyword.value)]
    texts = {"str(error)", *made} if remark else set(made)
    return any(isinstance(p, ast.JoinedStr) or ast.unparse(p) in texts for p in parts)


def cases_read() -> Broken:
    """What a case says is shown, and decides nothing: ``about`` says what it is about."""
    for module, path in sources().items():
        if room_of(module) in ("explain", "knowledge", "model", "prediction", "trt"):
            for node in nodes_like(path, ast.Attribute):
                if node.attr == "says":
                    yield f"case: {module}", f"{path.relative_to(HOME)}:{node.lineno}"


def cuts_an_error(node: ast.AST) -> bool:
    """Whether a part is taken off the text of an exception: ``str(error).removeprefix(...)``."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    text = node.func.value
    if not (
        isinstance(text, ast.Call) and isinstance(text.func, ast.Name) and text.func.id == "str"
    ):
        return False
    taken_off = node.func.attr in ("removeprefix", "removesuffix", "partition")
    return taken_off and any("error" in ast.unparse(arg) for arg in text.args)


# What placement and a check both refuse has one producer, beside the checks.
FORMS = {"LargeKernel", "DepthwiseAdd", "DepthwiseSilu"}


def forms_refused() -> Broken:
    for module, path in sources().items():
        for node in nodes_like(path, ast.Call):
            if (
                getattr(node.func, "attr", getattr(node.func, "id", "")) in FORMS
                and module != f"{LINT}.operators"
            ):
                yield f"form: {module}", f"{path.relative_to(HOME)}:{node.lineno}"


LAWS = (
    undeclared,
    upward,
    circles_of_rooms,
    circles_of_modules,
    calibration_knows_too_much,
    passes_that_need_another,
    versions_compared,
    targets_named,
    lists_of_operators,
    lists_with_one_home,
    onnx_loaded,
    onnxruntime_loaded,
    words_of_the_command_line,
    graphs_edited,
    sentences_read,
    messages_read,
    words_compared,
    words_elsewhere,
    parameters_in_words,
    codes_named,
    sentences_as_values,
    cases_read,
    forms_refused,
)


@functools.cache
def violations(law: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for what, where in LAWS[law]():
        found.setdefault(what, []).append(where)
    return found


@pytest.mark.parametrize("law", range(len(LAWS)), ids=[law.__name__ for law in LAWS])
def test_structure(law: int) -> None:
    new = {k: v for k, v in violations(law).items() if k not in _NOT_YET}
    assert not new, "\n".join(
        f"{what} ({'; '.join(filter(None, where))})" for what, where in new.items()
    )


def test_what_is_read() -> None:
    source = """
import a.b
from a import c, other
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from a.d import D
def f():
    from a.e import E
    import a.elsewhere
"""
    found = imported(ast.walk(ast.parse(source)), ["a", "a.b", "a.c", "a.d", "a.e"])
    assert set(found) == {"a", "a.b", "a.c", "a.d", "a.e"}
    edges: dict[str, Iterable[str]] = {"a": "b", "b": "c", "c": "ad", "d": "e", "e": "", "f": "f"}
    assert circles(edges) == [["a", "b", "c"]]
    assert circles({"a": "bc", "b": "c", "c": ""}) == []
    assert {"qdqtool", "qdqtool.commands.cli", "qdqtool.trt.targets", "calibration"} <= set(
        sources()
    )
    assert "qdqtool.errors" in graph()["qdqtool.commands.cli"]
    assert rooms(
        {"qdqtool.a.b": frozenset({"qdqtool.c", "qdqtool.a.d"}), "qdqtool.c": frozenset()}
    ) == {"a": {"c"}, "c": set()}
    broken = {what for law in range(len(LAWS)) for what in violations(law)}
    assert broken >= _NOT_YET, (
        f"these hold now, take them off _NOT_YET: {sorted(_NOT_YET - broken)}"
    )


def test_what_cuts_an_error() -> None:
    cut = ["str(error).removeprefix(path)", "str(the_error).partition(': ')[2]"]
    kept = [
        "error.reason",
        "str(error)",
        "str(path).removeprefix('/')",
        "name.removeprefix(str(error))",
    ]
    for source in (*cut, *kept):
        found = any(cuts_an_error(node) for node in ast.walk(ast.parse(source)))
        assert found is (source in cut), source


def test_what_makes_a_sentence() -> None:
    made = [
        "Remark.A(why=f'{x} was')",
        "Remark.A(error=str(error))",
        "said('{a}', a=f'{b}')",
        "x.why_not = str(error)",
        "(Remark.A if x else Remark.B)(why=[f'{x}'])",
    ]
    kept = [
        "Remark.A(why=why)",
        "said('{a}', a=str(error))",
        "Remark.A(error=of_error(error))",
        "x.name = str(error)",
    ]
    for source in (*made, *kept):
        assert any(makes_a_sentence(node) for node in ast.walk(ast.parse(source))) is (
            source in made
        ), source
    for value, text in (
        ("f'{x} was'", True),
        ("[f'{x} was' for x in y]", True),
        ("f'{x} was' if x else ''", True),
        ("said('{x} was')", False),
        ("f'{x}.{y}'", False),
        ("f'{x} was'.split()", False),
    ):
        (node,) = ast.parse(f"why = {value}").body
        assert isinstance(node, ast.Assign) and makes_a_text(node.value) is text, value
    assert makes_a_sentence(ast.parse("said('{a}', a=[why])", mode="eval").body, {"why"})
    named = ["'use `exclude`'", "'use `unify=False`'", "f'`{name}` is'", "f'`{name}={value}` is'"]
    kept = ["'use {`exclude`}'", "'``exclude``'", "'run `dot -Tsvg`'", "f'{name}` is'"]
    for source in (*named, *kept):
        assert any(names_a_parameter(node) for node in ast.walk(ast.parse(source))) is (
            source in named
        ), source


def test_what_reads_a_sentence() -> None:
    source = """
def test() -> None:
    assert "was made" in found.notes[0]
    assert any("was made" in note for note in found.notes)
    said = [n for n in found.notes if n.startswith("cache")]
    assert said[0].remark is Remark.MADE and said[0].values["name"] == "cache"
    assert (found.code, found.why) == ("ADD-BOTH", "it was made")
    assert re.search("made", finding.message)
    assert found.notes == [Remark.MADE(name="cache")] and len(found.notes) == 1
    assert data["notes"][0].split("made ")[1] == "x"
    assert [f.code for f in found.notes] == ["ADD-BOTH"]
    assert WORD in finding.message and WORD in WORDS
    assert PATTERN.search(finding.message) and PATTERN.search(finding.node)
    assert any(word in finding.message for word in WORDS)
    assert finding.node in finding.message
WORD = "was made"
WORDS = (WORD, "is")
PATTERN = re.compile("was (made)")
"""
    assert sorted(set(lines_that_read(source))) == [3, 4, 5, 7, 8, 10, 12, 13, 14]


# The reading itself -----------------------------------------------------------------------------------------------
