"""Every page of the built site in a real browser: `make docs-browser`, or `python -m tests.browser --shots FOLDER`.

At the width of a phone and of a desk, in light and in dark: no page scrolls sideways, no script fails, every request is
answered, by the site alone. The search finds a public name. Without chromium it ends with one line that says so.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

SITE = Path(__file__).parents[1] / "site"
WIDTHS = {"small": (390, 844), "large": (1400, 900)}
SCHEMES = ("light", "dark")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDER = """() => [...document.querySelectorAll("article *")].filter(e => {
    if (e.getBoundingClientRect().right <= innerWidth + 1) return false;
    for (let p = e.parentElement; p; p = p.parentElement)
        if (["auto", "scroll", "hidden"].includes(getComputedStyle(p).overflowX)) return false;
    return true;
}).slice(0, 3).map(e => e.outerHTML.slice(0, 120))"""
UNSEEN = """() => [...document.querySelectorAll("article img")].filter(
    e => getComputedStyle(e).display != "none" && !(e.complete && e.naturalWidth)).map(e => e.src)"""


class Handler(SimpleHTTPRequestHandler):
    """Serves files without a word."""

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Address of a server of a folder's files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def faults(browser: Any, address: str, name: str, shots: Path | None) -> list[str]:
    """What is wrong with a page, at every width and in both schemes."""
    found: list[str] = []
    with browser.new_context(viewport={"width": 1400, "height": 900}) as context:
        page = context.new_page()
        page.on("pageerror", lambda error: found.append(f"script: {error}"))
        page.on("console", lambda message: found.append(message.text) if message.type in ("error", "warning") else None)
        page.on("requestfailed", lambda request: found.append(f"failed: {request.url}"))
        page.on(
            "response", lambda answer: found.append(f"{answer.status}: {answer.url}") if answer.status > 399 else None
        )
        page.on("request", lambda request: None if here(request.url, address) else found.append(f"asks {request.url}"))
        page.goto(f"{address}/{name}", wait_until="networkidle")
        page.add_style_tag(content="* { transition: none !important }")  # measured at rest
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            found += [] if shows(page, scheme) else [f"{scheme} is not shown"]
            for size, (width, height) in WIDTHS.items():
                page.set_viewport_size({"width": width, "height": height})
                page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
                across = page.evaluate("document.scrollingElement.scrollWidth")
                found += [f"{size}: {across} pixels wide"] if across > width else []
                found += [f"{size}: sticks out: {element}" for element in page.evaluate(WIDER)]
                if shots is not None:
                    file = shots / f"{name.removesuffix('.html').replace('/', '-')}-{size}-{scheme}.png"
                    page.screenshot(path=file, full_page=True)
            found += [f"{scheme}: no picture {source}" for source in page.evaluate(UNSEEN)]
    return found


def shows(page: Any, scheme: str) -> bool:
    """Whether a page takes the colors of the system."""
    name = {"light": "default", "dark": "slate"}[scheme]
    try:
        page.wait_for_function(f"document.body.getAttribute('data-md-color-scheme') == '{name}'", timeout=10_000)
    except Exception:
        return False
    return True


def search(browser: Any, address: str, words: str) -> list[str]:
    """What is wrong with the search for some words that the site has."""
    with browser.new_context(viewport={"width": 1400, "height": 900}) as context:
        page = context.new_page()
        page.goto(f"{address}/index.html", wait_until="networkidle")
        for _ in range(10):  # words that come before the index has been read find nothing, and are typed again
            page.fill("input.md-search__input", "")
            page.locator("input.md-search__input").press_sequentially(words, delay=20)
            try:
                page.wait_for_selector(".md-search-result__item", timeout=2_000)
            except Exception:
                continue
            return []
    return [f"finds nothing for {words!r}"]


def here(url: str, address: str) -> bool:
    """Whether an address is the site's own."""
    return url.startswith((address, "data:", "blob:"))


def main() -> None:
    """Open every page; exit with 1 if one has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shots", type=Path, help="Folder for a picture of each page.")
    parser.add_argument("--page", action="append", help="A page, such as index.html; absent: all.")
    options = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit(print(f"skipped: none of {', '.join(BROWSERS)} is installed"))
    from playwright.sync_api import sync_playwright

    if options.shots:
        options.shots.mkdir(parents=True, exist_ok=True)
    names = options.page or sorted(path.relative_to(SITE).as_posix() for path in SITE.glob("**/*.html"))
    wrong = 0
    with sync_playwright() as playwright, served(SITE) as address:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name in [name for name in names if name != "404.html"]:
            for fault in dict.fromkeys(faults(browser, address, name, options.shots)):
                wrong += 1
                print(f"{name}: {fault}")
        for fault in search(browser, address, "LowBitStage"):
            wrong += 1
            print(f"search: {fault}")
        browser.close()
    print(f"{len(names)} pages, {len(WIDTHS)} widths, {len(SCHEMES)} color schemes: {wrong} faults")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
