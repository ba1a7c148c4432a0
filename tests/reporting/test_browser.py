import csv
import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import qdqtool
from tests.reporting.browser import Page
from tests.reporting.conftest import NetworkFiles
from tests.reporting.networks import CONVOLUTIONS, narrow_yolov8x_qdq
from tests.reporting.test_collect import FIRST, result, write
from tests.reporting.test_page import hostile
from tests.trt.evidence import HOME, truth

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def full(files: NetworkFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    out = folder / "full.html"
    qdqtool.report(
        files.model,
        before=files.float,
        gpu="T4",
        calib_cache=files.cache,
        tuning=write(folder, result()),
    ).save(out)
    return out


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("large") / "yolov8x.html"
    qdqtool.report(narrow_yolov8x_qdq(), gpu="T4").save(out)
    return out


@pytest.mark.parametrize("case", FIRST[:2])
def test_recorded_build_draws_every_layer(chromium: Page, case: str, tmp_path: Path) -> None:
    report = qdqtool.report(HOME / case / "model.onnx.gz", target=truth(case)["target"])
    report.save(tmp_path / "r.html")
    chromium.open(tmp_path / "r.html")
    count = "return document.querySelectorAll('.stage .box').length"
    assert chromium.run(count) == len(report.page.model.onnx.boxes)
    chromium.run("document.querySelector('input[value=engine]').click()")
    assert chromium.run(count) == len(report.page.model.engine.boxes)
    assert chromium.run(
        "return document.querySelectorAll('#convolution-table tbody tr').length"
    ) == len(truth(case)["convolutions"])


@pytest.fixture
def open_full(chromium: Page, full: Path) -> None:
    chromium.open(full)


def test_click_shows_node_details(chromium: Page, open_full: None) -> None:
    chromium.run("""document.querySelector('.stage[data-side=after] .row.conv')
        .dispatchEvent(new MouseEvent('click', { bubbles: true }))""")
    text = details(chromium)
    for words in (
        "first",
        "INT8",
        "Scales",
        "weights",
        "Rules and passes",
        "Estimated",
        "Evidence",
    ):
        assert words in text, words
    assert chromium.run("return location.hash") == "#node-0"
    assert (
        chromium.run(
            "return document.querySelectorAll('.stage[data-side=before] .box.selected').length"
        )
        == 1
    )


def test_click_on_narrow_screen_scrolls_to_details(chromium: Page, full: Path) -> None:
    chromium.size(390, 844)
    chromium.open(full)
    chromium.run("""document.querySelector('.stage[data-side=after]').scrollIntoView({ block: 'end' });
        document.querySelector('.stage[data-side=before] .row.conv')
        .dispatchEvent(new MouseEvent('click', { bubbles: true }))""")
    chromium.wait(
        "return document.getElementById('details').getBoundingClientRect().top < innerHeight - 90",
    )
    assert "first" in details(chromium)


def test_selection_survives_change_of_view(chromium: Page, full: Path) -> None:
    chromium.open(full, "#node-0")
    text = details(chromium)
    for view in ("engine", "onnx"):
        chromium.run("document.querySelector(`input[value=${arguments[0]}]`).click()", view)
        assert "first" in chromium.run(
            "return document.querySelector('.stage[data-side=after] .box.selected').textContent"
        )
        assert details(chromium) == text


def details(page: Page) -> str:
    return str(page.run("return document.getElementById('details').textContent"))


def test_findings_and_nodes_link_to_each_other(chromium: Page, open_full: None) -> None:
    chromium.run(
        "document.querySelectorAll('details.group').forEach((group) => { group.open = true; })"
    )
    chromium.run("document.querySelector('#findings a[href^=\"#node-\"]').click()")
    chromium.wait("return document.querySelectorAll('#details article.finding').length > 0")
    assert chromium.run("return document.querySelectorAll('.box.selected').length") >= 1
    chromium.run("document.querySelector('#details a[href^=\"#finding-\"]').click()")
    chromium.wait("return document.querySelector('.flash') !== null")


@pytest.fixture
def open_large(chromium: Page, large: Path) -> None:
    chromium.open(large)


def test_search_highlights_and_selects_matches(chromium: Page, open_large: None) -> None:
    type_into(chromium, "search", "model.9/cv1 conv")
    matches = chromium.run(
        "return [...document.querySelectorAll('.box.match')].map((box) => box.textContent)"
    )
    assert len(matches) == 1 and "model.9/cv1/conv" in matches[0]
    press(chromium, "search", "Enter")
    assert "/model.9/cv1/conv/Conv" in details(chromium)
    type_into(chromium, "search", "no such node anywhere")
    assert chromium.run("return document.getElementById('search-count').textContent") == "0 found"
    assert chromium.run("return document.querySelectorAll('.searching').length") == 0  # no dimming
    press(chromium, "search", "Escape")
    assert chromium.run("return document.querySelectorAll('.searching').length") == 0


def type_into(page: Page, name: str, text: str) -> None:
    page.run(
        """const input = document.getElementById(arguments[0]); input.value = arguments[1];
        input.dispatchEvent(new Event('input', { bubbles: true }));""",
        name,
        text,
    )


def press(page: Page, name: str, key: str) -> None:
    page.run(
        """document.getElementById(arguments[0])
        .dispatchEvent(new KeyboardEvent('keydown', { key: arguments[1], bubbles: true }));""",
        name,
        key,
    )


def column(page: Page, table: str, number: int) -> list[Any]:
    cells: list[Any] = page.run(
        "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].filter((row) => !row.hidden)"
        ".map((row) => row.cells[arguments[1]].dataset.v ?? row.cells[arguments[1]].textContent.trim())",
        table,
        number,
    )
    return cells


def test_click_on_module_opens_it(chromium: Page, open_large: None) -> None:
    chromium.run("document.getElementById('zoom-fit').click()")
    names = chromium.run("""return [...document.querySelectorAll('.box.module .name')].map((name) => {
        const [text, all] = [name.getBoundingClientRect(), document.querySelector('.graph').getBoundingClientRect()];
        return [name.textContent, text.height, text.top >= all.top && text.bottom <= all.bottom]; })""")
    assert len(names) > 20 and all(height > 7 and inside for _, height, inside in names)
    for _ in range(2):  # walking past modules opens none
        chromium.run("""document.querySelector('.graph').dispatchEvent(
            new KeyboardEvent('keydown', { key: 'ArrowDown', bubbles: true, cancelable: true }))""")
    assert "model.1" in chromium.run(
        "return document.querySelector('.box.module.selected').textContent"
    )
    chromium.run("""[...document.querySelectorAll('.box.module')].find((box) => box.textContent.includes('model.9'))
        .dispatchEvent(new MouseEvent('click', { bubbles: true }))""")
    matches = chromium.run(
        "return [...document.querySelectorAll('.box.match')].map((box) => box.textContent)"
    )
    assert len(matches) >= 5 and all("model.9" in text for text in matches)
    assert chromium.run("return document.querySelector('input[name=view]:checked').value") == "onnx"
    assert "/model.9/cv1/conv/Conv" in details(chromium) and "Convolutions" in details(chromium)


def test_wheel_zooms_and_time_colors_boxes(chromium: Page, open_large: None) -> None:
    width = chromium.run("return document.querySelector('.world').getBoundingClientRect().width")
    chromium.run("""document.querySelector('.graph').dispatchEvent(
        new WheelEvent('wheel', { deltaY: -200, bubbles: true, cancelable: true, clientX: 300, clientY: 400 }))""")
    chromium.wait(
        f"return document.querySelector('.world').getBoundingClientRect().width > 1.3 * {width}",
    )
    chromium.run("""const paint = document.getElementById('paint'); paint.value = 'time';
        paint.dispatchEvent(new Event('change'));""")
    fills = chromium.run("""return [...document.querySelectorAll('.world .box')].map((box) => [
        parseFloat(box.style.getPropertyValue('--share')), getComputedStyle(box.querySelector('.body')).fill])""")
    assert max(share for share, _ in fills) == 70 and len({fill for _, fill in fills}) > 4
    assert "estimated" in chromium.run("return document.getElementById('heat-legend').textContent")


def test_exports_hold_graphs_and_tables(chromium: Page, open_full: None) -> None:
    chromium.run("""window.saved = []; URL.createObjectURL = (blob) => { window.saved.push(blob); return 'blob:none'; };
        window.names = []; HTMLAnchorElement.prototype.click = function () { window.names.push(this.download); };
        for (const name of ['export-svg', 'export-png']) document.getElementById(name).click();
        document.querySelector('#convolution-table .csv').click();""")
    chromium.wait("return window.saved.length === 3")
    texts = chromium.driver.execute_async_script(
        "const done = arguments[0]; Promise.all(window.saved.map((blob) => blob.type === 'image/png'"
        "? blob.arrayBuffer().then((b) => String(new DataView(b).getUint32(0))) : blob.text()))"
        ".then((all) => done([window.names, all]));"
    )
    saved = dict(zip(*texts, strict=True))
    root = ElementTree.fromstring(saved["model_qdq-onnx.svg"])
    words = "".join(root.itertext())
    assert "first" in words and "1x16x16x16" in words and "INT8 → " in words
    assert not any(
        a in ("class", "style") or "var(" in v for e in root.iter() for a, v in e.attrib.items()
    )
    assert saved["model_qdq-onnx.png"] == str(0x89504E47)
    rows = list(csv.reader(io.StringIO(saved["model_qdq-convolutions.csv"])))
    assert [row[1] for row in rows] == ["Convolution", "first", "second", "third"]
    assert len({len(row) for row in rows}) == 1 and float(rows[1][rows[0].index("Est. ms")]) > 0


_CLASHES = """
const seen = [...document.querySelectorAll('.stage[data-side=after] .world text, #roofline text, #histogram text')]
  .map((one) => [one, one.getBoundingClientRect()]).filter(([, box]) => box.width);
const found = [];
for (const [i, [a, p]] of seen.entries()) for (const [b, q] of seen.slice(i + 1)) {
  if (Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1.5
      && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 3.5) found.push(`${a.textContent} / ${b.textContent}`);
}
return found;
"""


@pytest.mark.parametrize("width", [1280, 390])
def test_texts_do_not_overlap(chromium: Page, full: Path, width: int) -> None:
    chromium.size(width)
    chromium.open(full)
    chromium.run(
        "document.querySelectorAll('main > section').forEach((one) => "
        "{ one.style.contentVisibility = 'visible'; })"
    )
    chromium.wait(
        "return document.querySelectorAll('#roofline .plot, #histogram .plot').length === 2",
    )
    assert chromium.run(_CLASHES) == []
    chromium.run("document.getElementById('zoom-fit').click()")
    assert chromium.run(_CLASHES) == []


def test_tables_sort_and_filter(chromium: Page, open_large: None) -> None:
    head = "return [...document.querySelectorAll('#layer-table th')].findIndex((h) => /Est. ms/.test(h.textContent))"
    number = chromium.run(head)
    click = "document.querySelectorAll('#layer-table th button')[arguments[0]].click()"
    chromium.run(click, number)
    times = [float(v) for v in column(chromium, "layer-table", number) if v]
    assert len(times) > 100 and times == sorted(times, reverse=True)
    order = "return document.querySelectorAll('#layer-table th')[arguments[0]].ariaSort"
    assert chromium.run(order, number) == "descending"
    chromium.run(click, number)
    assert [float(v) for v in column(chromium, "layer-table", number) if v] == times[::-1]
    assert len(column(chromium, "convolution-table", 1)) == CONVOLUTIONS
    chromium.run("""const input = document.querySelector('#convolution-table input'); input.value = 'model.22 float';
        input.dispatchEvent(new Event('input'));""")
    shown = column(chromium, "convolution-table", 1)
    assert 0 < len(shown) < CONVOLUTIONS and all("model.22" in name for name in shown)
    assert f"of {CONVOLUTIONS} rows" in chromium.run(
        "return document.querySelector('#convolution-table .count').textContent"
    )


def test_keyboard_walks_and_zooms(chromium: Page, open_large: None) -> None:
    key = """const graph = document.querySelector('.graph'); graph.focus();
        graph.dispatchEvent(new KeyboardEvent('keydown', { key: arguments[0], bubbles: true, cancelable: true }));"""
    for pressed, node in (
        ("ArrowDown", "model.0"),
        ("ArrowDown", "model.1"),
        ("ArrowUp", "model.0"),
    ):
        chromium.run(key, pressed)
        assert node in details(chromium)
    before = chromium.run("return document.querySelector('.world').getBoundingClientRect().width")
    for pressed, wider in (("+", True), ("0", False)):
        chromium.run(key, pressed)
        chromium.wait(
            "return document.querySelector('.world').getBoundingClientRect().width "
            f"{'>' if wider else '<'} {before}",
        )


def test_large_network_opens_and_pans_without_layout_of_each_box(
    chromium: Page, open_large: None
) -> None:
    opening = chromium.layouts()
    boxes = chromium.run("return document.querySelectorAll('.box').length")
    elements = chromium.run("return document.querySelectorAll('*').length")
    changed = chromium.pan(30)
    assert boxes > 100 and elements < 100 * boxes and opening < boxes / 10
    assert changed <= 3 and chromium.layouts() == opening  # the picture, its frame and the canvas


def test_hostile_names_stay_text(chromium: Page, tmp_path: Path) -> None:
    report = qdqtool.report(hostile(tmp_path / "m.onnx"), gpu="T4")
    report.save(tmp_path / "r.html")
    chromium.open(tmp_path / "r.html")
    assert chromium.run("return document.querySelectorAll('img, [onclick]').length") == 0
    for node in range(len(report.page.model.nodes)):
        chromium.run("location.hash = `#node-${arguments[0]}`", node)
    type_into(chromium, "search", "<script>")
    press(chromium, "search", "Enter")
    chromium.wait(
        "return document.getElementById('details').textContent.includes('<script>alert(1)')",
    )
    assert (
        chromium.run(
            "return document.querySelectorAll('#details script, #search-list script').length"
        )
        == 0
    )
    assert chromium.run("return document.querySelectorAll('script').length") == 2


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_page_fits_window_and_is_readable(
    chromium: Page, full: Path, width: int, dark: bool
) -> None:
    chromium.size(width, dark=dark)
    chromium.open(full, "#node-0")
    lines = """const headline = document.querySelector('.verdict');
        return headline.offsetHeight / parseFloat(getComputedStyle(headline).lineHeight);"""
    assert chromium.run(lines) < 2.5
    chromium.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    chromium.run(
        "document.querySelectorAll('main > section').forEach((one) => "
        "{ one.style.contentVisibility = 'visible'; })"
    )
    chromium.wait("return document.querySelectorAll('.plot').length >= 5")
    widths = """return [document.documentElement, document.querySelector('.sides').parentElement]
        .map((one) => one.scrollWidth)"""
    assert max(chromium.run(widths)) <= width and chromium.run(_CONTRAST) == []
    chromium.run("""const paint = document.getElementById('paint'); paint.value = 'time';
        paint.dispatchEvent(new Event('change'));""")
    for view in ("onnx", "engine", "modules"):
        chromium.run("document.querySelector(`input[value=${arguments[0]}]`).click()", view)
        assert chromium.run(_CONTRAST) == []
    assert chromium.run("return document.documentElement.scrollWidth") <= width


# WCAG 2: contrast of at least 4.5 between text and the nearest painted ground behind it (3 for large text).
_CONTRAST = """
const parse = (text) => {
  const mixed = /color\\(srgb ([\\d.]+) ([\\d.]+) ([\\d.]+)/.exec(text);
  if (mixed) return mixed.slice(1).map((part) => 255 * part);
  const found = /rgba?\\(([^)]+)\\)/.exec(text);
  return found ? found[1].split(/[ ,\\/]+/).map(Number) : null;
};
const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
  .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const ground = (node) => {
  const inBox = node.closest('.row, .flag, .mark, .box, .part');
  const painted = node instanceof SVGElement && inBox && inBox.querySelector('rect.cell, rect.body, rect');
  if (painted) {
    const fill = parse(getComputedStyle(painted).fill);
    if (fill && fill[3] !== 0) return fill;
  }
  for (let one = node; one; one = one.parentElement) {
    const colour = parse(getComputedStyle(one).backgroundColor);
    if (colour && (colour.length < 4 || colour[3] > 0.9)) return colour;
  }
  return [255, 255, 255];
};
const bad = new Set();
for (const node of document.querySelectorAll('body *')) {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  if (!own || !node.getClientRects().length || node.closest('script, style, option, title')) continue;
  const style = getComputedStyle(node);
  const colour = parse(node instanceof SVGElement ? style.fill : style.color);
  if (!colour) continue;
  const [a, b] = [light(colour), light(ground(node))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.7 && style.fontWeight >= 700);
  if (ratio < (large ? 3 : 4.5)) {
    const text = node.textContent.trim().slice(0, 30);
    bad.add(`${node.tagName}.${node.getAttribute('class')} "${text}" ${ratio.toFixed(2)}`);
  }
}
return [...bad].slice(0, 20);
"""


def test_plots_follow_selection(chromium: Page, open_full: None) -> None:
    for section, choice in (("histograms", "histogram-choice"), ("weights", "weights-choice")):
        chromium.run("document.getElementById(arguments[0]).scrollIntoView()", section)
        chromium.wait(f"return document.querySelectorAll('#{section} .bin').length > 0")
        before = chromium.run("return document.getElementById(arguments[0]).textContent", section)
        chromium.run(
            """const choice = document.getElementById(arguments[0]); choice.value = '1';
            choice.dispatchEvent(new Event('change'));""",
            choice,
        )
        assert (
            chromium.run("return document.getElementById(arguments[0]).textContent", section)
            != before
        )
    chromium.run("document.getElementById('time').scrollIntoView()")
    chromium.wait("return document.querySelectorAll('#roofline circle.int8').length > 0")
    chromium.run("""document.querySelector('#roofline circle.int8')
        .dispatchEvent(new MouseEvent('click', { bubbles: true }))""")
    assert "INT8" in details(chromium)
    chromium.run("document.getElementById('tuning').scrollIntoView()")
    chromium.wait("return document.querySelectorAll('#tuning-plot .pick').length === 1")


def test_page_prints_to_pdf(chromium: Page, open_full: None) -> None:
    printed = chromium.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(printed["data"]) > 20_000


def test_printed_page_is_light_and_shows_whole_network(chromium: Page, open_full: None) -> None:
    media = {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    chromium.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        paper, fill, inside = chromium.driver.execute_script("""
            const style = getComputedStyle(document.documentElement);
            const inside = [...document.querySelectorAll('.stage')].every((stage) => {
              const outer = stage.getBoundingClientRect();
              const all = stage.querySelector('svg.world').getBoundingClientRect();
              return all.width > 0 && all.left >= outer.left - 1 && all.right <= outer.right + 1
                && all.top >= outer.top - 1 && all.bottom <= outer.bottom + 1;
            });
            return [style.getPropertyValue('--surface').trim(), style.getPropertyValue('--int8-fill').trim(), inside];
        """)
    finally:
        chromium.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert paper in ("#fff", "#ffffff") and fill == "#e0f2e5" and inside
