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
from qdqtool.errors import QdqtoolError
from qdqtool.reporting import page
from qdqtool.util import limits
from tests.errors import has
from tests.findings.lint.test_fp8 import chain
from tests.findings.test_causes import residual
from tests.reporting.conftest import NetworkFiles
from tests.trt.builder import Graph
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


class TagParser(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_page_loads_nothing(files: NetworkFiles) -> None:
    text = qdqtool.report(files.model, before=files.float, gpu="T4", calib_cache=files.cache).html
    for tag, attributes in TagParser(text).tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form"), tag
        assert "src" not in attributes and "style" not in attributes and "srcset" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_page_policy_allows_only_its_own_script_and_style(files: NetworkFiles) -> None:
    text = qdqtool.report(files.model).html
    policy = next(
        attributes["content"]
        for _, attributes in TagParser(text).tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None and policy.startswith("default-src 'none'") and "unsafe" not in policy
    for kind in ("script", "style"):
        bodies = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        assert len(bodies) == 1
        digest = base64.b64encode(hashlib.sha256(bodies[0].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_page_uses_every_asset() -> None:
    folder = Path(page.__file__).with_name("assets")
    assert {p.name for p in folder.iterdir()} == {*page.SCRIPTS, "style.css", "page.html"}


def test_page_escapes_hostile_names(tmp_path: Path) -> None:
    text = qdqtool.report(hostile(tmp_path / "<b>&model.onnx")).html
    tags = [tag for tag, _ in TagParser(text).tags]
    assert tags.count("script") == 2 and "b" not in tags[:12]
    assert "alert(1)</script>" not in text and "onerror=alert(1)>" not in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e]", text)
    assert "{{7*7}}" in html.unescape(text) and len(text) < 5_000_000
    packed = re.search(
        r'<script type="application/octet-stream" id="page-data">([\w+/=]*)</script>', text
    )
    nodes = json.loads(zlib.decompress(base64.b64decode(packed[1])))["model"]["nodes"]
    assert any("<script>alert(1)</script>" in node["name"] for node in nodes)
    assert all(len(node["name"]) <= page.MAX_NAME + 40 for node in nodes)


def test_display_name_shortens_long_names_apart() -> None:
    first, second = (page.display_name("x" * 1999 + end) for end in "ab")
    assert first != second and "…" in first and page.display_name("short") == "short"
    assert page.shorten_name("/model.2/cv1/conv/Conv", 10) == "…conv/Conv"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.5, "0.5"), (999, "999"), (1234, "1.23 k"), (2.5e9, "2.5 G")],
)
def test_amount_has_three_digits_and_a_unit(value: float | None, text: str) -> None:
    assert page.format_amount(value) == text


def test_sort_key_and_count_texts() -> None:
    assert [page.sort_key(v) for v in (None, 2)] == ["", "2.0"]
    plural = page.FILTERS["plural"]
    assert plural(1, "layer") == "1 layer" and plural(3, "layer") == "3 layers"


@pytest.mark.parametrize(
    ("name", "op", "plain"),
    [
        ("/model.2/conv/Conv", "Conv", "model.2/conv"),
        ("Conv_3", "Conv", "Conv_3"),
        ("/Conv", "Conv", "Conv"),
        ("a/b", "Conv", "a/b"),
    ],
)
def test_strip_operator_drops_slash_and_operator(name: str, op: str, plain: str) -> None:
    assert page.strip_operator(name, op) == plain


@pytest.mark.parametrize(
    ("name", "value", "text", "check"),
    [
        pytest.param(
            "importlib.util.find_spec",
            lambda _: None,
            None,
            has("missing-package", "jinja2", "qdqtool[report]"),
            id="missing packages",
        ),
        pytest.param(
            "qdqtool.util.limits.REPORT", 1000, "its report takes", None, id="too large page"
        ),
    ],
)
def test_report_is_refused(
    files: NetworkFiles,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: object,
    text: str | None,
    check: Any,
) -> None:
    monkeypatch.setattr(name, value)
    with pytest.raises(QdqtoolError, match=text, check=check):
        qdqtool.report(files.model)


def test_report_of_large_graph_has_tables_without_picture(
    files: NetworkFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DRAWN_LAYERS", 2)
    report = qdqtool.report(files.model)
    assert "too many" in report.page.model.onnx.why and "third" in report.html


def test_save_never_replaces_an_input(files: NetworkFiles, tmp_path: Path) -> None:
    report = qdqtool.report(files.model, before=files.float, calib_cache=files.cache)
    for path in (files.model, files.float, files.cache):
        before = path.read_bytes()
        with pytest.raises(QdqtoolError, match=path.name):
            report.save(path)
        assert path.read_bytes() == before
    out = tmp_path / "r.html"
    report.save(out)
    assert out.read_text() == report.html and report.as_json()["bytes"] == out.stat().st_size


def test_report_names_model_in_memory(files: NetworkFiles) -> None:
    assert "a model in memory" in qdqtool.report(onnx.load(files.model)).html


@pytest.mark.parametrize(
    ("types", "title", "count"),
    [
        (("INT8", "INT8"), "Convolutions in INT8", 2),
        (("FP8", "FP8"), "Convolutions in FP8", 2),
        (("INT8", "FP8", "FP8"), "Convolutions in INT8 and FP8", 3),
    ],
)
def test_page_counts_int8_and_fp8(types: tuple[str, ...], title: str, count: int) -> None:
    tile = qdqtool.report(chain(*types), target="10.16").html.split('<div class="tile">')[1]
    assert f"<h2>{title}</h2>" in tile and f'<p class="big">{count}<small>' in tile


def test_page_names_matrix_products_that_it_counts(g: Graph) -> None:
    """A classifier's Gemm is one of the layers in the tile, as in the JSON of predict."""
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "c", 16), "r")
    x = g.op("Flatten", g.op("GlobalAveragePool", x, "pool"), "flat")
    weights = g.weights("fc", (4, 16), "qdq")
    model = g.model(g.op("Gemm", [g.pair(x, "fc.in"), weights], "fc", transB=1))
    tile = qdqtool.report(model).html.split('<div class="tile">')[1]
    counts = qdqtool.predict(model).summary()
    assert (counts["convolutions"], counts["matrix_products"]) == (2, 1)
    assert "<h2>Convolutions and matrix products in INT8</h2>" in tile
    assert f'<p class="big">{counts["int8"]}<small> of 2</small>' in tile


def test_page_has_the_range_of_conversions_of_the_verdict() -> None:
    before, after = residual("own"), residual("own", activation=True)
    page = qdqtool.report(after, before=before).html
    low, high = qdqtool.predict(after).conversions_range or (0, 0)
    assert low < high and f"{low} to {high} Q/DQ layers remain, depending on" in page
    assert f'remain</h2><p class="big">{low} to {high}</p>' in page
    (row,) = re.findall(r"remain</th><td>(.*?)</td><td>(.*?)</td>", page)
    assert row == (str(qdqtool.predict(before).conversions), f"{low} to {high}")


def test_page_counts_findings_by_code_as_predict_does(g: Graph) -> None:
    x = g.pair(g.input(1, 8, 8, 8), "in", 0.1, zero=3)
    g.channels[x] = 8
    x = g.pair(g.relu(g.conv(x, "c", 16, scale=None), "r"), "mid", 0.1, zero=5)
    g.channels[x] = 16
    model = g.model(g.conv(x, "d", 16, scale=None))
    contents, fixed = qdqtool.report(model).page, qdqtool.fix(model, only=["ZP-NONZERO"])
    errors = [f for f in contents.model.findings if f.severity == "error"]
    assert contents.model.rejected and [f.code for f in errors] == ["ZP-NONZERO"] * 2
    assert contents.model.counts_without_errors == fixed.after.summary() != fixed.before.summary()
    assert [(c.inputs, c.output) for c in contents.model.convs] == [
        (c.inputs, c.output) for c in fixed.after.convolutions
    ]
    errors[0].severity = "warning"
    html = page.render_page(contents)
    tile = '<p class="big">4</p>\n<p class="muted">■ 1 error, ▲ 1 warning, ● 2 notes.'
    assert (
        tile in html and html.count(": ZP-NONZERO</span>") == 2 and "that remain</h2>" not in html
    )


@pytest.mark.parametrize(
    ("precision", "options", "without_errors", "condition"),
    [
        ("INT8", {"gpu": "GTX 1080"}, " Without the errors: 2 of 2", "if built"),
        ("FP8", {"target": "trt8.5"}, "", "with the errors"),  # fix cannot remove the error
    ],
)
def test_page_counts_no_int8_in_a_rejected_model(
    precision: str, options: dict[str, Any], without_errors: str, condition: str
) -> None:
    text = qdqtool.report(chain(precision, precision), **options).html
    tile = text.split('<div class="tile">')[1]
    assert f"{precision}</h2>" in tile and '<p class="big word">none</p>' in tile
    assert f" the model.{without_errors}</p>" in tile and "with INT8 output" not in tile
    assert f">Output, {condition}<" in text and not re.search('id="layers"|"remarks"', text)
