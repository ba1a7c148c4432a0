"""Print the pages of the documentation that are too long.

usage: python -m tools.page_heights [build/site] [--all]

Heights are measured in a window with a width of 1280 pixels. Pages of tables may be longer. The
script needs Chromium, chromedriver and the extra ``test``.
"""

import argparse
from pathlib import Path

from tests.reporting.browser import browser, missing

WIDTH, LIMIT = 1280, 10_000  # pixels
_TABLES = (
    "return [...document.querySelectorAll('table')].reduce((sum, t) => sum + t.offsetHeight, 0)"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=Path, nargs="?", default=Path("build/site"))
    parser.add_argument("--all", action="store_true", help="print every page")
    arguments = parser.parse_args()
    if reason := missing():
        raise SystemExit(reason)
    with browser() as page:
        page.size(WIDTH, 1000)
        for path in sorted(arguments.site.rglob("*.html")):
            page.driver.get(path.resolve().as_uri())
            height = page.run("return document.documentElement.scrollHeight")
            tables = page.run(_TABLES)
            if arguments.all or height - tables > LIMIT:
                name = path.relative_to(arguments.site)
                print(f"{height:7} px, {tables:6} px of them tables  {name}")


if __name__ == "__main__":
    main()
