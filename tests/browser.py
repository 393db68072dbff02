"""Every page of the built site in a real browser: `make docs-browser`, or `python -m tests.browser --shots FOLDER`.

At the width of a phone and of a desk, in light and in dark: no page scrolls sideways, no script fails, every request is
answered, by the site alone. The search finds a public name, in a site that is opened as a file, too. Without chromium
it ends with one line that says so.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

SITE = Path(__file__).parents[1] / "site"
WIDTHS = {"small": (390, 844), "large": (1400, 900)}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SHOWN = {
    scheme: f"document.body.getAttribute('data-md-color-scheme') == '{name}'"
    for scheme, name in (("light", "default"), ("dark", "slate"))
}
UNSEEN = """() => [...document.querySelectorAll("article img")].filter(
    e => getComputedStyle(e).display != "none" && !(e.complete && e.naturalWidth)).map(e => e.src)"""
WIDER = """() => [...(document.querySelector("article") ?? document.body).querySelectorAll("*")].filter(e => {
    if (e.getBoundingClientRect().right <= innerWidth + 1) return false;
    for (let p = e.parentElement; p; p = p.parentElement)
        if (["auto", "scroll", "hidden"].includes(getComputedStyle(p).overflowX)) return false;
    return !e.closest("svg");
}).slice(0, 3).map(e => e.outerHTML.slice(0, 120))"""


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


def faults(
    browser: Any, url: str, inside: str, shown: Mapping[str, str], unseen: str, *, shot: Path | None, settle: float = 0
) -> list[str]:
    """What is wrong with a page, at every width and in both color schemes.

    Args:
        inside: what the addresses of all requests begin with, but for data.
        shown: a script by color scheme that is true once the page is shown in it.
        unseen: a script that lists what should be seen, and is not.
        shot: prefix of the files of pictures. settle: milliseconds until the page has taken a new width.
    """
    found: list[str] = []
    with browser.new_context(viewport={"width": 1400, "height": 900}) as context:
        page = context.new_page()
        page.on("pageerror", lambda error: found.append(f"script: {error}"))
        page.on("dialog", lambda dialog: (found.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("console", lambda message: found.append(message.text) if message.type in ("error", "warning") else None)
        page.on("requestfailed", lambda request: found.append(f"failed: {request.url[:80]}"))
        page.on(
            "response", lambda answer: found.append(f"{answer.status}: {answer.url}") if answer.status > 399 else None
        )
        own = (inside, "data:", "blob:")
        page.on("request", lambda r: None if r.url.startswith(own) else found.append(f"asks {r.url[:80]}"))
        page.goto(url, wait_until="networkidle")
        page.add_style_tag(content="* { transition: none !important }")  # measured at rest
        for scheme, script in shown.items():
            page.emulate_media(color_scheme=scheme)
            for size, (width, height) in WIDTHS.items():
                page.set_viewport_size({"width": width, "height": height})
                deadline = time.monotonic() + 60
                while not page.evaluate(script):  # `wait_for_function` needs what the page's security policy refuses
                    if time.monotonic() > deadline:
                        found.append(f"{scheme} is not shown")
                        break
                    page.wait_for_timeout(50)
                page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
                page.wait_for_timeout(settle)
                across = page.evaluate("document.scrollingElement.scrollWidth")
                found += [f"{size}: {across} pixels wide"] if across > width else []
                found += [f"{size}: sticks out: {element}" for element in page.evaluate(WIDER)]
                found += [f"{size}, {scheme}: not to be seen: {each}" for each in page.evaluate(unseen)]
                if shot is not None:
                    shot.parent.mkdir(parents=True, exist_ok=True)
                    page.screenshot(path=f"{shot}-{size}-{scheme}.png", full_page=True)
    return found


def search(browser: Any, address: str, words: str) -> list[str]:
    """What is wrong with the search for some words that the site has."""
    with browser.new_context(viewport={"width": 1400, "height": 900}) as context:
        page = context.new_page()
        page.goto(f"{address}/index.html", wait_until="networkidle")
        for _ in range(10):  # words that come before the index has been read find nothing, and are typed again
            try:
                page.fill("input.md-search__input", "", timeout=2_000)
                page.locator("input.md-search__input").press_sequentially(words, delay=20)
                page.wait_for_selector(".md-search-result__item", timeout=2_000)
            except Exception:
                continue
            return []
    return [f"{address}: finds nothing for {words!r}"]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; without one, one line says so and the program ends well."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit(print(f"skipped: none of {', '.join(BROWSERS)} is installed"))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def tell(found: Mapping[str, list[str]]) -> None:
    """Print the faults by page, each once, and exit with 1 if there is one."""
    wrong = [f"{name}: {fault}" for name, each in found.items() for fault in dict.fromkeys(each)]
    print(*wrong, f"{len(found)} pages, {len(WIDTHS)} widths, 2 color schemes: {len(wrong)} faults", sep="\n")
    sys.exit(bool(wrong))


def main() -> None:
    """Open every page; exit with 1 if one has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shots", type=Path, help="Folder for a picture of each page.")
    parser.add_argument("--page", action="append", help="A page, such as index.html; absent: all.")
    options = parser.parse_args()
    found: dict[str, list[str]] = {"index.html": []}
    with chromium() as browser, served(SITE) as address:
        for name in options.page or sorted(path.relative_to(SITE).as_posix() for path in SITE.glob("**/*.html")):
            if name != "404.html":
                shot = options.shots and options.shots / name.removesuffix(".html").replace("/", "-")
                found[name] = faults(browser, f"{address}/{name}", address, SHOWN, UNSEEN, shot=shot)
        for place in (address, SITE.as_uri()):
            found["index.html"] += search(browser, place, "LowBitStage")
    tell(found)


if __name__ == "__main__":
    main()
