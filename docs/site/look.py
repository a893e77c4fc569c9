"""Looks at the built site in the system's Chromium or Chrome, on a desk and on a phone.

Nothing scrolls sideways on a desk. On a phone the page does not, and names in tables do not break.
The search offers the functions. `python docs/site/look.py [FOLDER]`; screenshots of some pages are
left in `$SCREENSHOTS`, if it is set.
"""

import os
import shutil
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from check import SEARCHES
from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DESK, PHONE = 1280, 390  # pixels
SHOWN = ("", "overview/", "docs/api/jaxpar/", "docs/links/", "notebooks/04_overlapped_matmuls/")
WIDE = """
[...document.querySelectorAll("html, .md-content *")].filter(e =>
  e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 &&
  (e === document.documentElement || /auto|scroll/.test(getComputedStyle(e).overflowX))
).map(e => `${e.tagName} ${e.scrollWidth} > ${e.clientWidth}: ${e.innerText.slice(0, 40)}`)
"""
BROKEN = """
[...document.querySelectorAll(".md-content td code")].filter(e =>
  !/\\s/.test(e.innerText) && new Set([...e.getClientRects()].map(box => box.top)).size > 1
).map(e => `${e.innerText} is broken`)
"""
OFFERED = """
[...document.querySelectorAll(".md-search-result__article :is(h1, h2)")].map(e => e.textContent)
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def faults_of(page, name, width):
    found = page.evaluate(WIDE)
    if width == PHONE:
        found = [text for text in found if text.startswith("HTML")] + page.evaluate(BROKEN)
    return [f"{name} at {width}: {text}".replace("\n", " ") for text in found]


def failed_searches(page, home):
    for word, names in SEARCHES.items():
        page.goto(f"{home}?q={word}")
        page.locator(".md-search-result__item").first.wait_for(state="attached")
        offered = [text.strip() for text in page.evaluate(OFFERED)]
        yield from (f"a search for {word} does not show {n}" for n in names if n not in offered)


def looks(browser, folder, home):
    asked = set()
    for width in (DESK, PHONE):
        for scheme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme
            )
            page = context.new_page()
            page.on("request", lambda request: asked.add(request.url))
            for path in sorted(folder.rglob("index.html")):
                name = path.relative_to(folder).as_posix().removesuffix("index.html")
                if scheme == "dark" and name not in SHOWN:
                    continue  # widths are those of the light one
                page.goto(home + name)
                yield from faults_of(page, name or "home", width)
                if (shots := os.environ.get("SCREENSHOTS")) and name in SHOWN:
                    file = f"{name.strip('/').replace('/', '_') or 'home'}-{width}-{scheme}.png"
                    page.screenshot(path=Path(shots, file))
            if (width, scheme) == (DESK, "light"):
                yield from failed_searches(page, home)
            context.close()
    for url in sorted(asked):
        if not url.startswith((home, "data:", "blob:")):
            yield f"{url} is loaded from outside"


def main(folder="site"):
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, f"none of {', '.join(BROWSERS)} is on the PATH: apt-get install chromium"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        home = f"http://127.0.0.1:{server.server_port}/"
        faults = list(looks(browser, Path(folder), home))
        browser.close()
    print(*faults, f"{len(faults)} faults at {DESK} and {PHONE} pixels", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
