"""Build the documentation: the pages of this folder, those made from tables and outputs, then the site.

usage: python -m docs.build_site [--output build/site] [--pages-only]

The examples of all commands and of docs/python run on the demo's model, so that their output is that of this version.
Nothing is downloaded. Needs the extra ``docs``. With TensorRT-RTX installed, the pages of ``build``, ``verify``,
``log`` and ``engine`` show a real build.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import calibration
import qdqtool
from qdqtool import qat
from qdqtool.builders.compiler_process import is_installed
from qdqtool.commands import cli
from qdqtool.errors import VersionError
from qdqtool.evidence import Evidence
from qdqtool.findings.build_methods import BUILD_METHODS
from qdqtool.findings.codes import CODES, FindingCodeEntry
from qdqtool.findings.errors import KNOWN_ERRORS, KnownError
from qdqtool.findings.rules import ATTEMPTED_CODES, PROMISED_CODES
from qdqtool.trt.pipeline import cases
from qdqtool.trt.targets import BUILDS, TARGETS, Target, target_of_version
from qdqtool.util.tables import read_sections
from tools import readme

DOCS = Path(__file__).parent
ROOT = DOCS.parent
#: Pages that are made here: texts name them ("the page *Builds*"), for in the repository there is nothing to link to.
MADE = {
    "Builds": "builds.md",
    "Findings": "findings/index.md",
    "Targets": "targets/index.md",
    "Build methods": "ways.md",
}
SOURCES = "https://github.com/OWNER/qdqtool/blob/main"  # where your copy of the repository lives
LINES = 60  # of an answer, on its page
CHANGELOG_LINES = 250  # of one page
MEMBERS = 8  # of a module on one page

#: The navigation. A folder's pages follow its index.
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Start",
        (
            "index.md",
            "first-hour.md",
            "other-tools.md",
            "your-accuracy.md",
            "qat.md",
            "ci.md",
            "terms.md",
        ),
    ),
    (
        "Guides",
        (
            "insert.md",
            "transformers.md",
            "fp8.md",
            "times.md",
            "ways.md",
            "compare.md",
            "fix.md",
            "tune.md",
            "report.md",
            "extract.md",
            "cluster.md",
        ),
    ),
    ("Commands", ("commands/index.md",)),
    ("Findings", ("findings/index.md",)),
    ("TensorRT's errors", ("errors/index.md",)),
    ("Targets", ("targets/index.md", "builds.md")),
    (
        "Measurements",
        (
            "evidence.md",
            "timing.md",
            "accuracy.md",
            "calibration-methods.md",
            "scales.md",
            "scales-results.md",
            "attention.md",
            "tune-search.md",
            "tune-results.md",
            "qat-results.md",
            "qat-models.md",
            "speed.md",
        ),
    ),
    ("Python", ("python/index.md", "examples/index.md")),
    ("Project", ("architecture.md", "contributing.md", "SECURITY.md", "changelog/index.md")),
)


def main() -> None:
    """Build pages and site, and end with mkdocs' exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build" / "site", help="folder of the site"
    )
    parser.add_argument(
        "--pages-only", action="store_true", help="write the pages next to it, and no site"
    )
    given = parser.parse_args()
    made = given.output.resolve().with_name("pages")
    shutil.rmtree(made, ignore_errors=True)
    titles = write_pages(made)
    config = made.with_name("mkdocs.json")  # JSON is YAML
    config.write_text(
        json.dumps(
            {
                "INHERIT": str(DOCS / "mkdocs.yml"),
                "docs_dir": str(made),
                "site_dir": str(given.output.resolve()),
                "hooks": [str(DOCS / "mkdocs_hooks.py")],
                "nav": navigation(titles),
                "plugins": {"mkdocstrings": {"handlers": {"python": {"paths": [str(ROOT)]}}}},
            }
        )
    )
    if not given.pages_only:
        command = [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "-f",
            str(config),
        ]  # quiet, it would count no warning
        env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            print(re.sub("^INFO.*\n", "", done.stderr, flags=re.M), file=sys.stderr)
        sys.exit(done.returncode)


def write_pages(folder: Path) -> dict[str, str]:
    """Write all pages and pictures, and return the title of each page by its path."""
    pages = dict(written_pages())
    pages |= finding_pages() | error_pages() | target_pages() | example_pages() | changelog_pages()
    pages |= {"builds.md": builds_page(), "ways.md": ways_page()}
    with tempfile.TemporaryDirectory() as name:
        readme.write_demo(Path(name))
        pages |= command_pages(Path(name)) | python_pages(Path(name))
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip() + "\n", encoding="utf-8")
    for picture in (*DOCS.glob("*.png"), *DOCS.glob("*.svg")):
        shutil.copy(picture, folder)
    titles = {name: re.search(r"^# (.*)", text, re.M)[1] for name, text in pages.items()}  # type: ignore[index]
    titles["index.md"] = (
        "INT8 models for TensorRT"  # the README's own title is the name of the site
    )
    return {name: title.replace("`", "") for name, title in titles.items()}


def navigation(titles: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the navigation for mkdocs, with every page once.

    Raises:
        ValueError: A page is in no section.
    """
    left, parts = dict(titles), []
    for part, names in PARTS:
        entries = []
        for name in names:
            if name not in left:
                continue
            entries.append({left.pop(name): name})
            if name.endswith("/index.md"):
                inside = sorted(n for n in left if n.startswith(name.removesuffix("index.md")))
                entries += [{left.pop(n): n} for n in inside]
        parts.append({part: entries})
    if left:
        raise ValueError(f"not in the navigation: {', '.join(left)}")
    return parts


# Pages that are written by hand ------------------------------------------------------------------------------------


def written_pages() -> Iterator[tuple[str, str]]:
    """Yield path and text of the pages of this folder, with the README as the first page.

    Raises:
        ValueError: The README is out of date.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if readme.renew(text) != text:
        raise ValueError("README.md is out of date; run 'python -m tools.readme'")
    for path in sorted(DOCS.glob("*.md")):
        yield path.name, with_links(path.read_text(encoding="utf-8"), "../")
    yield "index.md", with_links(text, "").replace("](docs/", "](")


def changelog_pages() -> dict[str, str]:
    """Return a page for each version of the changelog, and an index."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](../")
    pages: dict[str, str] = {}
    for version in re.split(r"^## ", text, flags=re.M)[1:]:
        title, _, body = version.partition("\n")
        parts = [""]
        for section in re.split(r"^(?=### )", body.strip() + "\n", flags=re.M):
            if parts[-1].count("\n") + section.count("\n") > CHANGELOG_LINES and parts[-1]:
                parts.append("")
            parts[-1] += section
        name = re.sub(r"\W+", "-", title.split(" ")[0]).strip("-").lower()
        for number, part in enumerate(parts, 1):
            suffix = f" ({number} of {len(parts)})" if len(parts) > 1 else ""
            pages[f"changelog/{name}-{number}.md"] = f"# {title}{suffix}\n\n{part}"
    rows = [
        f"* [{text.split(chr(10))[0].removeprefix('# ')}]({Path(name).name})"
        for name, text in pages.items()
    ]
    return {"changelog/index.md": _page("# Changelog", "\n".join(rows)), **pages}


def with_links(text: str, up: str) -> str:
    """Return a text with links to the pages of examples, to pages that only the site has, and to scripts."""
    text = re.sub(rf"\]\({re.escape(up)}(benchmarks/\w+\.py)\)", rf"]({SOURCES}/\1)", text)
    text = re.sub(r"`qdqtool (\w+) --help`", r"[`qdqtool \1 --help`](commands/\1.md)", text)
    text = re.sub(
        r"(?:[Oo]n\s+the site )?the page \*([\w ]+)\*", lambda m: f"[{m[1]}]({MADE[m[1]]})", text
    )
    text = re.sub(rf"\]\({re.escape(up)}examples/([\w-]+)\.py\)", r"](examples/\1.md)", text)
    return re.sub(rf"\]\({re.escape(up)}examples/([\w-]+)/?\)", r"](examples/\1.md)", text)


def example_pages() -> dict[str, str]:
    """The programs of examples/ as pages."""
    pages = {}
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix == ".py":
            about = path.read_text(encoding="utf-8").split('"""')[1].strip().split("\n")[0]
            pages[f"examples/{path.stem}.md"] = (
                f"# {path.name}\n\n{about}\n\n{_fence(path.read_text(), 'python')}"
            )
        elif (path / "README.md").exists():
            text = (path / "README.md").read_text(encoding="utf-8")
            pages[f"examples/{path.name}.md"] = text.replace("](../../docs/", "](../")
            for source in sorted(path.glob("*.py")):
                code = _fence(source.read_text(encoding="utf-8"), "python")
                name = f"examples/{path.name}-{source.stem}.md"
                pages[name] = f"# {path.name}/{source.name}\n\n{code}"
    rows = "\n".join(f"* [{Path(name).stem}]({Path(name).name})" for name in pages)
    return {
        "examples/index.md": f"# Examples\n\nPrograms of the folder `examples/`.\n\n{rows}",
        **pages,
    }


#: Public names on the page of each function, besides the function itself.
RESULTS = {
    "insert": ("Insertion",),
    "predict": ("Prediction", "ConvOutcome", "Finding", "Precision"),
    "verify": ("Verification",),
    "compare": ("Comparison",),
    "tune": ("Tuning",),
    "fix": ("Fixed",),
    "report": ("Report",),
    "extract": ("Extraction",),
}


def python_pages(folder: Path) -> dict[str, str]:
    """Return a page for each function with an example and its output, run in a folder with the demo's files.

    Raises:
        RuntimeError: An example fails, or a public name is on no page.
    """
    left = {name for name in qdqtool.__all__ if not name.startswith("_")}
    left -= {*RESULTS, *(name for names in RESULTS.values() for name in names)}
    if left:
        raise RuntimeError(f"no page has {', '.join(sorted(left))}")
    pages, rows = {}, []
    for verb, names in RESULTS.items():
        source = (DOCS / "python" / f"{verb}.py").read_text(encoding="utf-8")
        about, _, code = source.partition("\n\n")
        about = about.strip('"').strip()
        example = _fence(code, "python")
        output = _fence(_run_example(DOCS / "python" / f"{verb}.py", folder))
        pages[f"python/{verb}.md"] = _page(
            f"# qdqtool.{verb}",
            about,
            example,
            "prints",
            output,
            *_names("qdqtool", (verb, *names)),
        )
        rows.append((f"[`qdqtool.{verb}`]({verb}.md)", about))
    others = {
        "testing": (
            "qdqtool.testing",
            ["assert_int8"],
            "Check in pytest that a model runs in INT8.",
        ),
        "builders": (
            "qdqtool.builders",
            ["build"],
            "Build engines with TensorRT-RTX, trtexec or the tensorrt package.",
        ),
        "qat": (
            "qdqtool.qat",
            qat.__all__,
            "Insert and train quantizers in a PyTorch network (QAT).",
        ),
        "calibration": (
            "calibration",
            calibration.__all__,
            "Measure ranges of tensors on images, without inserting Q/DQ.",
        ),
        "models": (
            "qdqtool.ir.modelfile",
            ["ModelSource"],
            "Type of the models that functions accept.",
        ),
        "choices": (
            "qdqtool.insertion.options",
            [
                "RangeMethod",
                "HeadChoice",
                "ResidualChoice",
                "AttentionChoice",
                "WeightForm",
                "HighPrecision",
                "InputType",
            ],
            "Types of the choices of insert, tune and qat.",
        ),
        "errors": (
            "qdqtool.errors",
            ["QdqtoolError", "ModelError", "DataError", "BuildLogError"],
            "Errors.",
        ),
    }
    for name, (module, members, about) in others.items():
        groups = {"": list(members)}
        if len(members) > MEMBERS:
            groups = {"": [m for m in members if m[0].islower()]}
            groups["-classes"] = [m for m in members if m[0].isupper()]
        for suffix, group in groups.items():
            title = f"{module}{suffix.replace('-', ', ')}"
            pages[f"python/{name}{suffix}.md"] = _page(f"# {title}", about, *_names(module, group))
            rows.append((f"[`{module}`{suffix.replace('-', ', ')}]({name}{suffix}.md)", about))
    index = _page(
        "# Python",
        "The functions of this table do the same as the commands. A model is a path, bytes, an `onnx.ModelProto` or an "
        "onnx-graphsurgeon graph. Bad input raises a `qdqtool.errors.QdqtoolError` with the message that the command "
        "would print.",
        "onnx-graphsurgeon drops the metadata of a model, such as YOLO's class names and strides. `to_graphsurgeon()` of "
        "the results of `insert`, `fix`, `tune`, `extract` and `qat.export` returns a graph that has the metadata as the "
        "attribute `metadata_props`. All functions that take a model read them there. "
        "`examples/edit_with_graphsurgeon.py` cuts a network, inserts pairs and predicts the edited graph.",
        _table(("name", "purpose"), rows),
    )
    return {"python/index.md": index, **pages}


def _run_example(path: Path, folder: Path) -> str:
    env = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{path}: {done.stderr}")
    return done.stdout.replace(f"{folder}/", "")


def _names(module: str, names: Iterable[str]) -> list[str]:
    return [f"::: {module}.{name}" for name in names if not name.startswith("_")]


# Commands ----------------------------------------------------------------------------------------------------------


def command_pages(folder: Path) -> dict[str, str]:
    """Return a page for each command with its help and the output of its examples, run in a folder."""
    examples = read_sections(Path(qdqtool.__file__).parent / "commands" / "examples.toml")
    pages, rows = {}, []
    # In the order of the table: later examples read files that earlier ones wrote.
    shown = {c: [_example(e, folder) for e in given] for c, given in examples.items()}
    for command, about in cli.COMMANDS.items():
        usage = _fence(readme.run([command, "--help"], folder)[0])
        pages[f"commands/{command}.md"] = _page(
            f"# qdqtool {command}", about, *shown[command], "## Options", usage
        )
        rows.append((f"[{command}]({command}.md)", about))
    index = _page(
        "# Commands",
        "Exit codes of every command: 0 done (for `verify`: everything agrees); 1 a check failed (a mismatch, or a "
        "condition of `--require` or `--fail-on` that is not met); 2 bad input or usage, with one line on stderr.",
        _table(("command", "purpose"), rows),
        "The outputs on these pages are those of this version for the model of `qdqtool demo`: YOLOv8n with random "
        "weights, "
        f"{readme.SIZE} x {readme.SIZE} pixels, {readme.IMAGES} generated images. Long outputs are shortened.",
    )
    return {"commands/index.md": index, **pages}


def _example(example: Mapping[str, str], folder: Path) -> str:
    head = f"## {example['says'][0].upper()}{example['says'][1:]}\n\n{_fence(example['run'])}"
    needs = example.get("needs")
    if needs is not None and not is_installed(needs):
        return head
    text, code = readme.run(shlex.split(example["run"])[1:], folder)
    if code == 2:
        raise RuntimeError(f"{example['run']}: {text}")
    lines = text.rstrip().splitlines()
    if len(lines) > LINES:
        lines = [*lines[:LINES], f"... and {len(lines) - LINES} more lines"]
    ended = f"\n\nThe command ends with exit code {code}." if code else ""
    shown = "\n".join(lines)
    return f"{head}\n\nprints\n\n{_fence(shown)}{ended}" if lines else f"{head}{ended}"


# Tables -----------------------------------------------------------------------------------------------------------


def finding_pages() -> dict[str, str]:
    """A page for each finding code."""
    order = ("error", "warning", "info")
    rows = [
        (
            f"[{c.code}]({c.code}.md)",
            c.severity.word,
            _cell(c.title),
            "yes"
            if c.code in PROMISED_CODES
            else "some places"
            if c.code in ATTEMPTED_CODES
            else "",
        )
        for c in sorted(CODES.values(), key=lambda c: (order.index(c.severity), c.code))
    ]
    index = _page(
        "# Findings",
        "This table lists the findings of `qdqtool predict`, errors first. The column *fix* marks the findings that "
        "`qdqtool fix` can repair.",
        _table(("code", "severity", "meaning", "fix"), rows),
    )
    return {"findings/index.md": index} | {
        f"findings/{c.code}.md": _finding(c) for c in CODES.values()
    }


def _finding(code: FindingCodeEntry) -> str:
    parts = [f"# {code.code}", f"**{_escaped(code.title)}** ({code.severity_text})"]
    parts += _sections(
        ("Cause", code.cause),
        ("Effect in TensorRT", code.tensorrt),
        ("In a log", code.log),
        ("Fix", code.fix),
    )
    if code.code in ATTEMPTED_CODES:
        condition = (
            "need no new data" if code.code in PROMISED_CODES else "`predict` marks with [*]"
        )
        command = _fence(f"qdqtool fix model.onnx --only {code.code} -o fixed.onnx")
        parts.append(
            f"`qdqtool fix` repairs the places of this finding that {condition}:\n\n{command}"
        )
    rows = [
        (
            ", ".join(f"[{t}](../targets/{t}.md)" for t in h.targets),
            h.evidence_text,
            (h.severity or code.severity).word,
            _cell(h.source),
        )
        for h in code.holds
    ]
    entries = [known for known in KNOWN_ERRORS if code.code in known.codes]
    parts += ["## Affected targets", _table(("targets", "evidence", "severity", "source"), rows)]
    if entries:
        links = "\n".join(f"* [{_escaped(k.title)}](../errors/{k.id}.md)" for k in entries)
        parts += ["## Messages of TensorRT", links]
    return _page(*parts)


def error_pages() -> dict[str, str]:
    """A page for each text of TensorRT."""
    index = _page(
        "# TensorRT's errors and warnings",
        'This table explains errors and warnings for a Q/DQ model. `qdqtool explain "the text"` finds the entry of '
        "a text, even if TensorRT prints the text in another form.",
        _table(
            ("meaning", "severity"),
            [(f"[{_cell(k.title)}]({k.id}.md)", k.severity) for k in KNOWN_ERRORS],
        ),
    )
    return {"errors/index.md": index} | {f"errors/{k.id}.md": _error(k) for k in KNOWN_ERRORS}


def _error(known: KnownError) -> str:
    parts = [
        f"# {_escaped(known.title)}",
        f"{known.severity.capitalize()}. Recognized by the regular expression\n\n"
        f"{_fence(known.pattern)}",
    ]
    parts += _sections(
        ("Cause", known.cause),
        ("What to do", known.fix),
        ("Versions", known.versions),
        ("Fixed by NVIDIA", known.fixed),
        ("Unknown", known.unknown),
        ("Source", known.source),
    )
    if known.codes:
        links = ", ".join(f"[{c}](../findings/{c}.md)" for c in known.codes)
        parts.append(
            f"`qdqtool predict` reports the cause of this message before the build: {links}"
        )
    return _page(*parts)


def target_pages() -> dict[str, str]:
    """For each target what is seen on it."""
    index = _page(
        "# Targets",
        "This table shows the evidence of the rules for each version of TensorRT. `--target` accepts any version "
        "from 8.0 on, such as 10.3. A version without a row has the rules of the latest earlier version in this table.",
        _table(
            ("target", "evidence", "basis"),
            [(f"[{t.name}]({t.name}.md)", t.evidence, _cell(t.proof)) for t in TARGETS.values()],
        ),
    )
    return {"targets/index.md": index} | {
        f"targets/{t.name}.md": _target(t) for t in TARGETS.values()
    }


def _target(target: Target) -> str:
    builds = (
        [b for b in BUILDS.values() if target.name in _targets_of(b.tensorrt)]
        if not target.is_rtx
        else []
    )
    own = {b.name for b in builds}
    seen = [
        (f"`{name}`", _cell(case.says), ", ".join(b for b in case.build_names() if b in own))
        for name, case in cases().items()
        if case.evidence == Evidence.SEEN and own & set(case.build_names())
    ]
    parts = [
        f"# {target.name}",
        f"{str(target.evidence).capitalize()}: {_escaped(target.proof)}.",
        "## Builds",
    ]
    if builds:
        rows = [
            (f"`{b.name}`", b.tensorrt, b.gpu or "not stated", _cell(b.network), _cell(b.parts))
            for b in builds
        ]
        parts.append(_table(("build", "TensorRT", "GPU", "network", "available"), rows))
    elif target.is_rtx:
        parts.append(
            "The rules come from experiments with TensorRT-RTX, which builds engines without a GPU. `make fuzz` builds "
            "random networks, and compares the engines with the predictions."
        )
    else:
        parts.append("No published build of this version is known.")
    differing = list(_differences(target))
    parts += (
        [
            "## Differences from other targets",
            _table(("property", "this target", "default"), differing),
        ]
        if differing
        else []
    )
    parts += (
        ["## Rules seen in these builds", _table(("rule", "what TensorRT does", "builds"), seen)]
        if seen
        else []
    )
    holding = ((c, c.scope_on(target.name)) for c in CODES.values())
    rows = [
        (f"[{c.code}](../findings/{c.code}.md)", h.evidence, _cell(c.title))
        for c, h in holding
        if h is not None
    ]
    parts += ["## Findings for this target", _table(("code", "evidence", "meaning"), rows)]
    return _page(*parts)


def _targets_of(versions: str) -> set[str]:
    """The targets of the versions that a text names (``8.4 or 8.5``)."""
    found = set()
    for version in re.findall(r"\d+(?:\.\d+)*", versions):
        try:
            found.add(target_of_version(version).name)
        except VersionError:
            continue
    return found


def _differences(target: Target) -> Iterator[tuple[str, str, str]]:
    """What a switch of this target means, as its class describes it, how it is here and how it is by default."""
    about = dict(
        re.findall(r"^ {8}(\w+): (.*?)(?=\n {8}\w+: |\Z)", Target.__doc__ or "", re.M | re.S)
    )
    for field in fields(Target):
        here = getattr(target, field.name)
        if isinstance(here, bool) and here != field.default and field.name in about:
            yield _cell(about[field.name]), *(("yes", "no") if here else ("no", "yes"))


def builds_page() -> str:
    """Return the page of all builds with their sources and the rules that they support."""
    builds = [
        (
            f"`{b.name}`",
            b.tensorrt,
            b.gpu or "not stated",
            b.flags,
            b.network,
            b.parts,
            b.source,
            *("yes" if there else "no" for there in (b.graph, b.is_rule_source)),
        )
        for b in BUILDS.values()
    ]
    rules: dict[Evidence, list[tuple[str, ...]]] = {evidence: [] for evidence in Evidence}
    for name, case in cases().items():
        found, count = (f"`{name}`", case.says, case.source), len(case.build_names())
        if case.evidence == Evidence.SEEN:
            says = f"{case.says} ({case.source})" if case.source else case.says
            found = (
                f"`{name}`",
                says,
                ", ".join(case.builds),
                "**one**" if count == 1 else str(count),
            )
        rules[case.evidence].append(found)
    inferred = ("rule", "effect in TensorRT", "reason")
    return _page(
        "# Builds and the rules that they support",
        "The rules are the cases of passes (`qdqtool/trt/passes`) and operators (`qdqtool/ir/operators.py`). Each line "
        "that `predict --trace` prints comes from exactly one case. The JSON of a prediction names the cases of each "
        'convolution, and `qdqtool explain "<a line of a log>"` names the case of a line. Numbers after the name of a '
        "build are line numbers of its log.",
        "## Builds",
        _table(
            (
                "build",
                "TensorRT",
                "GPU",
                "flags",
                "network",
                "parts",
                "source",
                "graph in the tests",
                "used to derive rules",
            ),
            builds,
        ),
        "## Rules seen in builds",
        "The last column counts the builds that show the rule. A rule that only **one** build shows may be refuted by "
        "another build.",
        _table(("rule", "effect in TensorRT", "builds", "number of builds"), rules[Evidence.SEEN]),
        "## Rules that are documented",
        _table(inferred, rules[Evidence.DOCUMENTED]),
        "## Rules that are assumed",
        _table(inferred, rules[Evidence.ASSUMED]),
    )


def ways_page() -> str:
    """How to build, in the words of each builder."""
    parts = [
        "# Build methods: qdqtool predict --for",
        "`predict --for NAME` and `explain --for NAME` print the flags of the build method NAME for your target.",
    ]
    for way in BUILD_METHODS.values():
        rows = (
            ("up to TensorRT 10", way.weak),
            ("strongly typed", way.typed or way.strong),
            ("TensorRT 11", way.strong),
            ("a log for `verify`", way.log),
            ("restrictions", way.care),
            ("source", way.source),
        )
        parts += [f"## {way.name}", _table(("", ""), [(name, _cell(text)) for name, text in rows])]
    return _page(*parts)


# Markdown ----------------------------------------------------------------------------------------------------------


def _page(*parts: str) -> str:
    return "\n\n".join(parts)


def _sections(*texts: tuple[str, str]) -> list[str]:
    """Titles and texts, without those that are empty."""
    return [part for title, text in texts if text for part in (f"## {title}", _escaped(text))]


def _table(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    return "\n".join(
        f"| {' | '.join(map(str, row))} |" for row in (heads, ("---",) * len(heads), *rows)
    )


def _fence(text: str, language: str = "text") -> str:
    return f"````{language}\n{text.rstrip()}\n````"


def _escaped(text: str) -> str:
    pieces = re.split(r"``([^`]+)``", text)  # docstrings mark code so
    return "".join(
        f"<code>{_plain(piece)}</code>" if at % 2 else _plain(piece)
        for at, piece in enumerate(pieces)
    )


def _plain(text: str) -> str:
    text = (
        text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    )  # no backslash helps these
    return re.sub(r"([\\`*_\[\]#|])", r"\\\1", text)


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split()))


if __name__ == "__main__":
    main()
