"""The page is one file that loads nothing, and no name in it becomes markup."""

import base64
import hashlib
import html
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import onnx
import pytest

import qdqtool
from qdqtool.base import budgets
from qdqtool.errors import QdqtoolError
from qdqtool.render.reporting import page
from tests.raising import raises
from tests.render.reporting.conftest import Made
from tools.fuzz.grammar import network

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    '"\' onclick=alert(1) x="',
    "]]>-->{{7*7}}",
    "n" * 2000,
    "\x1b]0;owned\x07\u202e\x9b31m",
    "a\nb\tc",
    "日本語 ❤ 🎉",
)


def hostile(path: Path, seed: int = 11) -> Path:
    """A network whose nodes and tensors have names that hurt."""
    proto = network(seed)
    renamed: dict[str, str] = {}
    for number, node in enumerate(proto.graph.node):
        node.name = f"{HOSTILE[number % len(HOSTILE)]}/{number}"
        for i, tensor in enumerate(node.output):
            renamed[tensor] = f"{HOSTILE[(number + 3) % len(HOSTILE)]}|{number}|{i}"
    for node in proto.graph.node:
        node.input[:] = [renamed.get(t, t) for t in node.input]
        node.output[:] = [renamed.get(t, t) for t in node.output]
    for value in (*proto.graph.output, *proto.graph.value_info):
        value.name = renamed.get(value.name, value.name)
    path.write_bytes(proto.SerializeToString())
    return path


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def tags_of(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(text)
    return parser.tags


def test_loads_and_policies(made: Made) -> None:
    text = qdqtool.report(made.model, before=made.float, gpu="T4", calib_cache=made.cache).html
    for tag, attributes in tags_of(text):
        assert tag not in ("img", "iframe", "object", "embed", "base", "form"), tag
        assert "src" not in attributes and "style" not in attributes and "srcset" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    text = qdqtool.report(made.model).html
    policy = next(
        a["content"] for t, a in tags_of(text) if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None and policy.startswith("default-src 'none'") and "unsafe" not in policy
    for kind in ("script", "style"):
        bodies = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        assert len(bodies) == 1
        digest = base64.b64encode(hashlib.sha256(bodies[0].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    folder = Path(page.__file__).with_name("assets")
    assert {p.name for p in folder.iterdir()} == {*page.SCRIPTS, "style.css", "page.html"}


def test_names_and_numbers(tmp_path: Path) -> None:
    path = hostile(tmp_path / "<b>&model.onnx")
    report = qdqtool.report(path)
    found = tags_of(report.html)
    assert [t for t, _ in found].count("script") == 2 and "b" not in {t for t, _ in found[:12]}
    assert "alert(1)</script>" not in report.html and "onerror=alert(1)>" not in report.html
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e]", report.html)
    assert "{{7*7}}" in html.unescape(report.html) and len(report.html) < 5_000_000
    inner = re.search(
        r'<script type="application/octet-stream" id="page-data">([\w+/=]*)</script>', report.html
    )
    assert inner is not None
    data = json.loads(zlib.decompress(base64.b64decode(inner[1])))
    assert any("<script>alert(1)</script>" in n["name"] for n in data["model"]["nodes"])
    assert all(len(n["name"]) <= page.LONGEST + 40 for n in data["model"]["nodes"])
    one, two = ("x" * 1999 + end for end in "ab")
    assert page.shown(one) != page.shown(two) and "…" in page.shown(one)
    assert page.shown("short") == "short"
    assert page.short("/model.2/cv1/conv/Conv", 10) == "…conv/Conv"
    assert [page.amount(v) for v in (None, 0.5, 999, 1234, 2.5e9)] == [
        "–",
        "0.5",
        "999",
        "1.23 k",
        "2.5 G",
    ]
    assert [page.sort_key(v) for v in (None, 2)] == ["", "2.0"]
    assert page.counted(1, "layer") == "1 layer" and page.counted(3, "layer") == "3 layers"


@pytest.mark.parametrize(
    ("name", "op", "told"),
    [
        ("/model.2/conv/Conv", "Conv", "model.2/conv"),
        ("Conv_3", "Conv", "Conv_3"),
        ("/Conv", "Conv", "Conv"),
        ("a/b", "Conv", "a/b"),
    ],
)
def test_plain_names(name: str, op: str, told: str) -> None:
    assert page.plain(name, op) == told


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with raises(QdqtoolError, "require jinja2 qdqtool[report]"):
        qdqtool.report(made.model)


def test_a_graph_too_large_to_draw_still_has_its_tables(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "DRAWN_LAYERS", 2)
    report = qdqtool.report(made.model)
    assert "too many for a picture" in report.page.model.onnx.why and "third" in report.html


def test_a_page_too_large_is_refused(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "REPORT", 1000)
    with pytest.raises(QdqtoolError, match="its report takes"):
        qdqtool.report(made.model)


def test_saving_keeps_what_was_read(made: Made, tmp_path: Path) -> None:
    report = qdqtool.report(made.model, before=made.float, calib_cache=made.cache)
    for victim in (made.model, made.float, made.cache):
        before = victim.read_bytes()
        with raises(QdqtoolError, "Guard.check files"):
            report.save(victim)
        assert victim.read_bytes() == before
    report.save(tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == report.html
    told: dict[str, Any] = report.as_json()
    assert (
        told["bytes"] == (tmp_path / "r.html").stat().st_size
        and told["schema"] == "qdqtool/report/1"
    )


def test_models_in_memory(made: Made) -> None:
    assert "a model in memory" in qdqtool.report(onnx.load(made.model)).html
