"""Which error a test means is asked by its class, by who raised it and by the values in it, not by its words."""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from qdqtool.errors import ModelError
from qdqtool.trt.targets import target_of_version
from tests import tables
from tests.raising import raises

TESTS = Path(__file__).parent
MOST = 3  # words; more of them are a sentence

_LITERALS = re.compile(r'"((?:[^"\\\n]|\\.)*)"|' + r"'((?:[^'\\\n]|\\.)*)'")
_NAMED = re.compile(r"""\bmatch=(?![rf]?["'])|\bmatch=r?f["'].*\{""")  # anything but a literal
_COMPARED = re.compile(
    r"""[rf]?["'] in str\(caught|str\(caught\.value\) ==|== str\(caught|= str\(caught"""
)
_ASKED = r"""\b(?:raises|refused)\(\(?[\w., ]*\)?, """
_TOLD = re.compile(
    _ASKED + r"""f?["'][^\s"]+ ((?:[^"\\\n]|\\.)*)"""
)  # what stands behind the function
_WORD = re.compile(r"(?<![\w.`'/=])[a-z]{2,}(?![\w.,:'/=])")
_VALUES = re.compile(r"'[^']*'|`[^`]*`|\{[^}]*\}|\\\w")


def sentences(source: str) -> list[int]:
    """Lines with more words than MOST in a ``match=``, or as values of ``raises``; what is in quotes or braces apart.

    Read as text: to parse all tests takes a second. Strings are those of the line, or of the next one.
    """
    found = []
    for given in re.finditer(r"\bmatch=(.*)(?:(?<=match=\()\n(.*))?", source):
        texts = _LITERALS.findall(given[1]) or _LITERALS.findall(given[2] or "")
        if is_sentence(" ".join(one or other for one, other in texts)):
            found.append(source.count("\n", 0, given.start()) + 1)
    for given in _TOLD.finditer(source):
        if has_words(given[1]):
            found.append(source.count("\n", 0, given.start()) + 1)
    if _NAMED.search(source) or re.search(_ASKED + r"\w+[,)]", source):
        found += bound(source)
    return found + compared(source) if _COMPARED.search(source) else found


def is_sentence(text: str) -> bool:
    return len(re.findall(r"[A-Za-z]{2,}", _VALUES.sub(" ", text))) > MOST


def has_words(told: str) -> bool:
    return len(_WORD.findall(_VALUES.sub(" ", told))) > MOST


def bound(source: str) -> list[int]:
    """Lines of functions with a name in a ``match=``, or in what ``raises`` is given, that is bound to a sentence: in
    the rows of a table, by a loop, an assignment or a call."""
    tree = ast.parse(source)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    found = []
    lines = source.splitlines()
    for function in (n for n in tree.body if isinstance(n, ast.FunctionDef)):
        text = "\n".join(lines[function.lineno : function.end_lineno])
        if "match=" not in text and not re.search(_ASKED + r"\w+[,)]", text):
            continue
        inside = list(ast.walk(function))
        matched = [n.value for n in inside if isinstance(n, ast.keyword) and n.arg == "match"]
        wrong = is_sentence if matched else has_words
        matched += [
            n.args[1]
            for n in inside
            if isinstance(n, ast.Call)
            and len(n.args) > 1
            and getattr(n.func, "id", "") in ("raises", "refused")
        ]
        names = {n.id for value in matched for n in ast.walk(value) if isinstance(n, ast.Name)}
        bindings = list(bindings_of(function, [*inside, *tree.body], calls)) if names else []
        for _ in range(2):  # a row may name a constant
            for targets, value in bindings:
                if names.isdisjoint(targets):
                    continue
                parts = getattr(value, "elts", getattr(value, "args", []))
                if len(parts) == len(targets) > 1:
                    value = next(
                        part for target, part in zip(targets, parts, strict=True) if target in names
                    )
                names.update(n.id for n in ast.walk(value) if isinstance(n, ast.Name))
                if any(
                    isinstance(n, ast.Constant) and wrong(str(n.value)) for n in ast.walk(value)
                ):
                    found.append(function.lineno)
    return sorted(set(found))


def bindings_of(
    function: ast.FunctionDef, nodes: Sequence[ast.AST], calls: Sequence[ast.Call]
) -> Iterator[tuple[list[str], ast.expr]]:
    """Names that are bound together by nodes, by the decorators or by calls of a function, and to what."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield [n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name)], node.value
        elif isinstance(node, ast.For | ast.comprehension):
            names = [n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)]
            yield from ((names, row) for row in rows_of(node.iter))
    for made in (d.args for d in function.decorator_list if isinstance(d, ast.Call)):
        if len(made) == 2:
            texts = [n.value for n in ast.walk(made[0]) if isinstance(n, ast.Constant)]
            yield from (
                ([n.strip() for n in ",".join(texts).split(",")], row) for row in rows_of(made[1])
            )
        elif (
            made
            and isinstance(made[0], ast.Starred)
            and ast.unparse(made[0].value).startswith("cases(")
        ):
            names, *table = tables.rows(f"tables/{ast.literal_eval(made[0].value.args[0])}.tsv")  # type: ignore[attr-defined]
            yield from (
                (names, ast.parse(f"[{', '.join(row)}]", mode="eval").body) for row in table
            )
    parameters = [a.arg for a in function.args.args]
    for call in (n for n in calls if getattr(n.func, "id", "") == function.name):
        yield from (([name], value) for name, value in zip(parameters, call.args, strict=False))
        yield from (([k.arg or ""], k.value) for k in call.keywords)


def compared(source: str) -> list[int]:
    """Lines where what an error says, or a variable that was given it, is compared with a sentence."""
    found = []
    for function in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)):
        given = {
            getattr(n.targets[0], "id", ""): n.value
            for n in ast.walk(function)
            if isinstance(n, ast.Assign)
        }
        for node in (n for n in ast.walk(function) if isinstance(n, ast.Compare)):
            sides = [
                given.get(getattr(side, "id", None), side)
                for side in (node.left, *node.comparators)
            ]
            texts = [
                n.value for side in sides for n in ast.walk(side) if isinstance(n, ast.Constant)
            ]
            if any(map(is_sentence, map(str, texts))) and any(
                "caught.value" in ast.unparse(side) for side in sides
            ):
                found.append(node.lineno)
    return found


def rows_of(table: ast.expr) -> list[ast.expr]:
    """Those of a table that is written out, or made by a function of one (``slow_after``)."""
    while isinstance(table, ast.Call) and table.args:
        table = table.args[-1]
    given = getattr(table, "elts", [table])
    return [
        row.value.elt
        if isinstance(row, ast.Starred) and isinstance(row.value, ast.GeneratorExp)
        else row
        for row in given
    ]


@pytest.mark.slow
def test_no_test_matches_a_sentence_of_an_error() -> None:
    found = {str(path): sentences(path.read_text(encoding="utf-8")) for path in TESTS.rglob("*.py")}
    assert not {path: lines for path, lines in found.items() if lines and path != __file__}


@pytest.mark.parametrize(
    "head",
    [
        '@pytest.mark.parametrize(("x", "told"), [(1, "not one"), (2, "{}")])',
        '@in_turn("told", ["{}"])',
        '@pytest.mark.parametrize("x, told", slow_after(1, [*((x, "{}") for x in range(3))]))',
    ],
)
def test_a_sentence_in_a_table_is_one(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "\ndef test(x, told):\n    with pytest.raises(E, match={}):\n        f(x)\n"
    for words, wrong in (("the model is damaged", True), ("read_json 3 'Layers'", False)):
        for match in ("told", "f'{told}$'", "re.escape(told)"):
            assert bool(sentences(head.format(words) + body.format(match))) is wrong
    for line in (
        "told = 'a file of its own'",
        "for x, told in [(3, 'a file of its own')]:\n        pass",
    ):
        assert sentences(body.replace("with", f"{line}\n    with", 1).format("told"))
        assert not sentences(body.replace("with", f"{line}\n    with", 1).format("x"))
    helper = body.format("told").replace("test", "refused")
    assert sentences(helper + "\ndef test():\n    refused(3, 'a file of its own')\n")
    monkeypatch.setattr(tables, "rows", lambda _: [["x", "told"], ["3", "'a file of its own'"]])
    for match in ("told", "x"):
        found = sentences('@pytest.mark.parametrize(*cases("some"))' + body.format(match))
        assert bool(found) is (match == "told")


def test_what_is_a_sentence() -> None:
    kept = [
        "r'one of three'",
        "f'{name}: 3'",
        "re.escape(told)",
        "\"'the very first one'\"",
        "r'\\d \\w+ \\.onnx x'",
    ]
    for words in (
        *kept,
        "'the model is damaged'",
        "f'{name} is no such model'",
        "re.escape('a file of its own')",
    ):
        assert bool(sentences(f"pytest.raises(E, match={words})")) is (words not in kept), words


def test_a_sentence_that_an_error_is_compared_with_is_one() -> None:
    body = "def test():\n    said = str(caught.value)\n    told = {}\n    assert {}\n"
    for words, wrong in (("f'{path}: is a folder, give a file'", True), ("f'{path}: 3'", False)):
        for asked in ("said == told", f"{words} in str(caught.value)", "other == told"):
            assert bool(sentences(body.format(words, asked))) is (wrong and "other" not in asked), (
                words,
                asked,
            )


def test_values_are_no_sentence() -> None:
    for told, wrong in (
        ("read c.npy: 3 'images' jpg, png, bmp, webp", False),
        ("read no line of it is left", True),
    ):
        for call in ('with raises(E, f"{}"): pass', 'refused(E, "{}", f)'):
            assert bool(sentences(call.format(told))) is wrong
        table = f'@in_turn("told", ["{told}"])\ndef test(told):\n    refused(E, told, f)\n'
        assert bool(sentences(table)) is wrong


def test_what_is_asked_of_an_error() -> None:
    def refused(told: str, kind: type[Exception] = ModelError) -> None:
        with raises(kind, told):
            target_of_version("7.2")

    refused("target_of_version 7.2", Exception)
    for told in ("target_of_version 7.3", "target_named 7.2"):
        with pytest.raises(AssertionError):
            refused(told, Exception)
    with pytest.raises(Exception, match="7"):
        refused("target_of_version 7.2")
