"""Rules of the architecture that neither ruff nor import-linter can check.

`make lint` runs both.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT, nodes_like, sources

# Modules beside qdqtool/ir that edit a graph: copies and parts that are not a model yet.
GRAPH_EDITORS = {
    "qdqtool.extraction.reductions",
    "qdqtool.insertion.prepare",
    "qdqtool.qat.trace",
}


def layers() -> list[set[str]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    contract = next(c for c in settings["contracts"] if c["type"] == "layers")
    return [
        {name.strip().removeprefix("qdqtool.") for name in layer.split(":")}
        for layer in contract["layers"]
    ]


def test_structure_every_package_has_a_layer() -> None:
    """A package without a layer could import any package."""
    packages = {m.removeprefix("qdqtool.").partition(".")[0] for m in sources()} - {"qdqtool"}
    assert packages == set().union(*layers())


def test_structure_architecture_page_shows_the_layers() -> None:
    """Contributors read the page, and `make lint` checks the contract."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    lines = re.findall(r"^[┌├│└] (.*?)(?:  .*)?$", page, re.MULTILINE)
    assert [set(re.findall(r"\w+", line)) - {"qdqtool"} for line in lines] == layers()


def version_comparisons(path: Path) -> Iterator[int]:
    named = re.compile(r"trt\d+(\.\d+)?|rtx\d*(\.\d+)?")
    for node in nodes_like(path, ast.Compare, text=r"\.version\b|['\"](trt\d|rtx)"):
        for part in (p for side in (node.left, *node.comparators) for p in ast.walk(side)):
            is_version = isinstance(part, ast.Attribute) and part.attr == "version"
            is_name = isinstance(part, ast.Constant) and named.fullmatch(str(part.value))
            if is_version or is_name:
                yield node.lineno


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        pytest.param("if target.version >= (8, 6): x()", [1], id="version"),
        pytest.param("y = target.name == 'trt8.5'", [1], id="name"),
        pytest.param("if target.int8_weights: x('trt8.5')", [], id="property"),
    ],
)
def test_structure_version_comparisons_are_found(
    source: str, lines: list[int], tmp_path: Path
) -> None:
    (tmp_path / "module.py").write_text(source)
    assert list(version_comparisons(tmp_path / "module.py")) == lines


def test_structure_versions_are_compared_in_targets_only() -> None:
    """A new version is one new entry if versions differ only in properties of targets."""
    assert [
        f"{module}:{line}"
        for module, path in sources().items()
        if module != "qdqtool.trt.targets"
        for line in version_comparisons(path)
    ] == []


def test_structure_graphs_are_edited_by_model_only() -> None:
    """The index of a model is valid only if the model's editor makes all changes."""
    edits = re.compile(
        r"\.(node|initializer)\.(append|extend|insert|pop|remove)\(|\bdel [\w.]+\.(node|initializer)\["
    )
    assert {
        module
        for module, path in sources().items()
        if not module.startswith(("qdqtool.ir.", "qdqtool.proto.", "qdqtool.runtime."))
        and edits.search(path.read_text("utf-8"))
    } == GRAPH_EDITORS


def test_structure_fix_and_tune_read_no_messages() -> None:
    """`fix` and `tune` read codes, nodes and values, so that messages can be reworded."""
    assert [
        f"{module}:{node.lineno}"
        for module, path in sources().items()
        if module.startswith(("qdqtool.fixing", "qdqtool.tuning", "qdqtool.timing"))
        for node in nodes_like(path, ast.Attribute, text=r"\.message\b")
        if node.attr == "message"
    ] == []
