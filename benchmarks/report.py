"""Size and speed of reports in a browser, and the picture of one in docs/report.png.

usage: python -m benchmarks.report [--picture]      # needs Chromium, chromedriver and the extra `test`

For the demo's model and a network of YOLOv8x's size: seconds to write the page (CPU), its bytes, milliseconds from
opening it to the second frame after its scripts are done, and for 60 frames of dragging the network the longest task
that blocked the page. Each is the median of several openings; the promise is under 1.5 MB, 2 s and 100 ms on a machine
that does nothing else.
"""

import io
import statistics
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

import qdqtool
from qdqtool.commands.demo_run import write_images, yolov8n
from qdqtool.insertion.api import insert
from qdqtool.model.modelfile import save
from qdqtool.render.reporting.api import Report
from tests.render.reporting.browser import Page, browser, missing
from tests.render.reporting.networks import yolov8x_qdq

RUNS = 5
PICTURE = Path(__file__).parents[1] / "docs" / "report.png"
GPU = "RTX 3060"
_NODE = "/model.22/cv3.1/cv3.1.1/conv/Conv"  # where INT8 and float meet


def main() -> int:
    reason = missing()
    if reason:
        print(reason, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name, browser() as page:
        folder = Path(name)
        made = {"yolov8n (demo), before and after, histograms": lambda: demo(folder),
                "yolov8x": lambda: qdqtool.report(yolov8x_qdq(), gpu=GPU)}
        yolov8x_qdq()
        print(f"{'report of':<46}{'CPU s':>7}{'MB':>7}{'ready ms':>10}{'frame ms':>10}{'long ms':>9}")
        for title, make in made.items():
            begun = time.process_time()
            report = make()
            seconds = time.process_time() - begun
            path = folder / "report.html"
            report.save(path)
            size = path.stat().st_size / 1e6
            ready, frame, longest = measured(page, path)
            print(f"{title:<46}{seconds:>7.1f}{size:>7.2f}{ready:>10.0f}{frame:>10.1f}{longest:>9.0f}", flush=True)
            if "--picture" in sys.argv and "demo" in title:
                picture(page, path, report)
    return 0


def demo(folder: Path) -> Report:
    """The page of the demo's model, with everything but a build."""
    model, cache, quantized = folder / "yolov8n-demo.onnx", folder / "cache.npz", folder / "yolov8n-demo_qdq.onnx"
    if not quantized.exists():
        (folder / "images").mkdir()
        save(yolov8n(320), model)
        write_images(folder / "images", 16, 320)
        insert(model, folder / "images", calib_cache=cache).save(quantized)
    return qdqtool.report(quantized, before=model, gpu=GPU, calib_cache=cache)


def measured(page: Page, path: Path) -> tuple[float, float, float]:
    """Medians of: milliseconds until ready, a frame while dragging, the longest task while dragging (0 for none)."""
    ready, frames, longest = [], [], []
    for _ in range(RUNS):
        page.open(path)
        ready.append(page.ready_ms())
        page.run("document.getElementById('network').scrollIntoView()")
        page.pan(5)
        found = page.pan(60)
        frames.append(statistics.median(found["frames"]))
        longest.append(max(found["long"], default=0.0))
    if page.errors():
        print(page.errors(), file=sys.stderr)
    return statistics.median(ready), statistics.median(frames), statistics.median(longest)


def picture(page: Page, path: Path, report: Report) -> None:
    """Writes the picture of the documentation: small, few colours."""
    number = next(i for i, n in enumerate(report.page.model.nodes) if n.name == _NODE)
    alone = path.with_name("alone.html")
    qdqtool.report(path.with_name("yolov8n-demo_qdq.onnx"), gpu=GPU).save(alone)
    page.size(1280, 860)
    parts = []
    for fragment in ("", f"#node-{number}"):
        page.open(alone, fragment)
        page.ready_ms()
        if fragment:
            page.run("document.getElementById('network').scrollIntoView(); window.scrollBy(0, -8)")
        time.sleep(1.0)
        shot = path.with_name("shot.png")
        page.picture(shot)
        parts.append(Image.open(io.BytesIO(shot.read_bytes())).convert("RGB"))
    head = parts[0].crop((0, 0, 1280, 326))
    both = Image.new("RGB", (1280, 326 + 860))
    both.paste(head, (0, 0))
    both.paste(parts[1], (0, 326))
    both.quantize(160, dither=Image.Dither.NONE).save(PICTURE, optimize=True)
    page.size(1280)
    print(f"wrote {PICTURE} ({PICTURE.stat().st_size / 1e3:.0f} KB)")


if __name__ == "__main__":
    sys.exit(main())
