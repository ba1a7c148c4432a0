"""Headless Chromium that opens reports, for tests and for docs/report.png."""

import base64
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = (
    os.environ.get("QDQTOOL_CHROMIUM")
    or shutil.which("chromium")
    or shutil.which("chromium-browser")
)
DRIVER = shutil.which("chromedriver")

# Added before the page's own script.
_WATCH = """
window.thrown = [];
window.addEventListener('error', (e) => window.thrown.push(String(e.message)));
window.addEventListener('securitypolicyviolation', (e) => window.thrown.push('CSP ' + e.violatedDirective));
"""
_PAN = """
const done = arguments[arguments.length - 1];
const canvas = document.querySelector('.stage[data-side=after] .graph');
const box = canvas.getBoundingClientRect();
const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
const send = (type, dx, dy) => canvas.dispatchEvent(new PointerEvent(type, {
  bubbles: true, pointerId: 1, button: 0, buttons: 1, clientX: x + dx, clientY: y + dy }));
canvas.setPointerCapture = () => {};
const changed = new Set();
new MutationObserver((records) => records.forEach((record) => changed.add(record.target)))
  .observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
let frame = 0;
send('pointerdown', 0, 0);
const step = () => {
  frame += 1;
  if (frame > arguments[0]) {
    send('pointerup', 0, 0);
    setTimeout(() => done(changed.size), 120);
    return;
  }
  send('pointermove', 40 * Math.sin(frame / 9), -9 * frame);
  requestAnimationFrame(step);
};
requestAnimationFrame(step);
"""


def missing() -> str:
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed (pip install 'qdqtool[test]')"
    if CHROMIUM is None:
        return "no Chromium is installed (Debian: apt-get install chromium chromium-driver)"
    return (
        "" if DRIVER else "no chromedriver is installed (Debian: apt-get install chromium-driver)"
    )


class Page:
    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def open(self, path: Path, fragment: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(path.resolve().as_uri() + fragment)
        self.driver.execute_async_script("""
            const done = arguments[arguments.length - 1];
            const wait = () => document.readyState === 'complete'
              && document.documentElement.classList.contains('ready')
              ? requestAnimationFrame(() => requestAnimationFrame(done)) : setTimeout(wait, 5);
            wait();""")

    def wait(self, condition: str) -> None:
        self.driver.execute_async_script(
            "const done = arguments[0]; const look = () => "
            f"(() => {{ {condition} }})() ? done() : setTimeout(look, 20); look();"
        )

    def size(self, width: int, height: int = 900, dark: bool = False) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]},
        )

    def errors(self) -> list[str]:
        return [
            e["message"]
            for e in self.driver.get_log("browser")
            if e["level"] in ("SEVERE", "WARNING")
        ] + list(self.run("return window.thrown"))

    def layouts(self) -> int:
        metrics = self.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return int(next(m["value"] for m in metrics if m["name"] == "LayoutCount"))

    def pan(self, frames: int) -> int:
        return int(self.driver.execute_async_script(_PAN, frames))

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.driver.get_screenshot_as_base64()))


@contextmanager
def browser() -> Iterator[Page]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_script_timeout(60)
        driver.execute_cdp_cmd("Performance.enable", {})
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH})
        page = Page(driver)
        page.size(1280)
        yield page
    finally:
        driver.quit()
