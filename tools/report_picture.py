"""Write docs/report.png, a screenshot of a report: ``python -m tools.report_picture``.

The script needs Chromium, chromedriver and the extra ``test``.
"""

import tempfile
import time
from pathlib import Path

from PIL import Image

import qdqtool
from tests.reporting.browser import browser, missing
from tools.record_demo import quantized_demo

PICTURE = Path(__file__).parents[1] / "docs" / "report.png"
WIDTH = 1280  # pixels
HEAD, HEIGHT = 306, 860  # heights in pixels of the verdict, and of the network with its details
NODE = "/model.22/cv3.1/cv3.1.1/conv/Conv"  # at the border between INT8 and float


def main() -> None:
    """Write a screenshot with few colors: the verdict, and below it a node of the network."""
    if reason := missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as name, browser() as page:
        path, shot = Path(name) / "report.html", Path(name) / "shot.png"
        report = qdqtool.report(quantized_demo(Path(name), 16), gpu="RTX 3060")
        report.save(path)
        number = next(i for i, n in enumerate(report.page.model.nodes) if n.name == NODE)
        page.size(WIDTH, HEIGHT)
        both = Image.new("RGB", (WIDTH, HEAD + HEIGHT))
        for fragment, top, height in (("", 0, HEAD), (f"#node-{number}", HEAD, HEIGHT)):
            page.open(path, fragment)
            if fragment:
                page.run(
                    "document.getElementById('network').scrollIntoView(); window.scrollBy(0, -8)"
                )
            time.sleep(1.0)
            page.picture(shot)
            both.paste(Image.open(shot).crop((0, 0, WIDTH, height)), (0, top))
    both.quantize(160, dither=Image.Dither.NONE).save(PICTURE, optimize=True)
    print(f"wrote {PICTURE} ({PICTURE.stat().st_size / 1e3:.0f} KB)")


if __name__ == "__main__":
    main()
