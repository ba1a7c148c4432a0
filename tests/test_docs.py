"""What README and documentation name exists: commands, options, targets, files. `make docs` builds the site itself."""

import re
import shlex
from pathlib import Path

import pytest

from qdqtool.commands import cli
from qdqtool.trt.targets import TARGETS, target_named

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[list[str]]:
    """The calls of qdqtool in a page's fences, without what a shell does with their output."""
    lines = "\n".join(re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.M | re.S)).replace(
        "\\\n", " "
    )
    calls = re.findall(r"^(?:\$ |- run: )?(qdqtool .*)", lines, re.M)
    return [
        shlex.split(re.split(r"\s(?:>|>>|2>&1|\|) ?", call)[0], comments=True) for call in calls
    ]


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130 and "make demo" in text and "make test" in text
    assert sum(len(commands(page)) for page in PAGES) > 20


def test_the_page_of_evidence_shows_what_the_targets_say() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text("utf-8")
    shown = re.findall(r"^\| `((?:trt|rtx)[\d.]+)` \| (\w+) \| (.*) \|$", page, re.MULTILINE)
    names = {name for name, _, _ in shown}
    assert shown == [
        (t.name, str(t.evidence), t.proof) for t in reversed(TARGETS.values()) if t.name in names
    ]
    assert len(shown) > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_options_and_linked_files_exist(page: Path) -> None:
    for call in commands(page):
        command = cli.cli.get_command(None, call[1])  # type: ignore[arg-type]
        assert command is not None, call
        known = {s for p in command.params for s in p.opts}
        given = {word.partition("=")[0] for word in call[2:] if re.match("--?[a-z]", word)}
        assert given <= known | {"--help"}, call
        if "--target" in call:
            target_named(call[call.index("--target") + 1])
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", page.read_text()):
        if not re.match(r"\w+:|OWNER", link):
            assert (page.parent / link).exists(), link
    for path in re.findall(
        r"`((?:qdqtool|tests|calibration|benchmarks|docs)/[\w/]+\.\w+)`", page.read_text()
    ):
        assert (ROOT / path).exists(), path
