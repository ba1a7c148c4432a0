import re
import shlex
from pathlib import Path

import click
import pytest

import qdqtool
from docs import build_site
from qdqtool.commands.cli import cli
from qdqtool.trt.targets import TARGETS, target_named

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[list[str]]:
    lines = "\n".join(re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.M | re.S)).replace(
        "\\\n", " "
    )
    calls = re.findall(r"^(?:\$ |- run: )?(qdqtool .*)", lines, re.M)
    return [
        shlex.split(re.split(r"\s(?:>|>>|2>&1|\|) ?", call)[0], comments=True) for call in calls
    ]


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130 and "make demo" in text and "make test" in text
    assert sum(len(commands(page)) for page in PAGES) > 20


def test_evidence_page_has_the_evidence_of_each_target() -> None:
    rows = re.findall(
        r"^\| `((?:trt|rtx)[\d.]+)` \| (\w+) \| (.*) \|$",
        (ROOT / "docs" / "evidence.md").read_text("utf-8"),
        re.MULTILINE,
    )
    names = {name for name, _, _ in rows}
    assert rows == [
        (t.name, str(t.evidence), t.proof) for t in reversed(TARGETS.values()) if t.name in names
    ]
    assert len(rows) > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_page_names_existing_commands_options_and_files(page: Path) -> None:
    for call in commands(page):
        command = cli.get_command(click.Context(cli), call[1])
        assert command is not None, call
        used = {word.partition("=")[0] for word in call[2:] if re.match("--?[a-z]", word)}
        assert used <= {s for p in command.params for s in p.opts} | {"--help"}, call
        if "--target" in call:
            target_named(call[call.index("--target") + 1])
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", page.read_text()):
        if not re.match(r"\w+:|OWNER", link):
            assert (page.parent / link).exists(), link
    for path in re.findall(
        r"`((?:qdqtool|tests|calibration|benchmarks|docs)/[\w/]+\.\w+)`", page.read_text()
    ):
        assert (ROOT / path).exists(), path


def test_terms_page_names_existing_classes() -> None:
    section = (ROOT / "docs" / "terms.md").read_text("utf-8").partition("## Names in the code")[2]
    names = set(re.findall(r"`([A-Z]\w+)`", section))
    sources = [
        path.read_text("utf-8")
        for top in ("qdqtool", "tests")
        for path in (ROOT / top).rglob("*.py")
    ]
    classes = {name for text in sources for name in re.findall(r"^class (\w+)", text, re.M)}
    assert names <= classes and len(names) > 12


def test_every_page_is_in_the_navigation() -> None:
    listed = {name for _, names in build_site.PARTS for name in names}
    assert {page.name for page in PAGES[1:]} <= listed


def test_scripts_are_linked_in_the_repository() -> None:
    text = build_site.with_links("[a](../benchmarks/coco.py) and [b](other.md)", "../")
    assert text == f"[a]({build_site.SOURCES}/benchmarks/coco.py) and [b](other.md)"


def test_every_public_name_is_on_a_python_page() -> None:
    names = [name for verb, others in build_site.RESULTS.items() for name in (verb, *others)]
    assert sorted(names) == sorted(name for name in qdqtool.__all__ if name != "__version__")
