"""Pages of a server in a browser, for `check_page.py`: visited, asked, photographed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

import dflash_mlx  # noqa: F401  (before anything imports mlx)
from support.serving import Server

WIDE, PHONE = {"width": 1200, "height": 800}, {"width": 360, "height": 740}


@contextmanager
def visit(browser: Browser, server: Server, **how: Any) -> Iterator[Page]:
    """A page in a tab of its own; AssertionError for faults, dialogs and requests to elsewhere."""
    context, wrong = browser.new_context(**{"viewport": WIDE, **how}), list[str]()
    context.expose_function("owned", lambda: wrong.append("a text ran as a program"))
    page = context.new_page()
    page.on("pageerror", lambda error: wrong.append(f"fault: {error}"))
    page.on("dialog", lambda box: (wrong.append(f"dialog: {box.message}"), box.dismiss()))
    page.on("request", lambda sent: wrong.append(sent.url) if is_outside(sent.url) else None)
    page.on("console", lambda said: wrong.append(said.text) if is_fault(said) else None)
    is_outside = partial(_is_outside, server.url)
    page.goto(server.url)
    try:
        yield page
    finally:
        context.close()
    assert not wrong, wrong


def _is_outside(own: str, url: str) -> bool:
    return not url.startswith((f"{own}/", "data:,"))


def is_fault(said: Any) -> bool:
    """Whether a line on the console is one; a 401 and a server that is gone are told there, too."""
    return said.type in ("error", "warning") and "Failed to load resource" not in said.text


def ask(page: Page, text: str) -> str:
    """Send it by the keyboard and wait for the end of the answer, which is returned."""
    begin(page, text)
    idle(page)
    return page.inner_text("#log article:last-child .words")


def begin(page: Page, text: str) -> None:
    page.wait_for_selector("#model option", state="attached")
    page.fill("#words", text)
    page.press("#words", "Enter")


def idle(page: Page) -> None:
    page.wait_for_selector("body:not(.busy)")


def pick(page: Page, *files: bytes) -> None:
    """Choose files as a user does, with the button, and wait until they are shown."""
    page.wait_for_selector("#attach:visible")
    with page.expect_file_chooser() as chooser:
        page.click("#attach")
    named = [
        {"name": f"{i}.png", "mimeType": "image/png", "buffer": f} for i, f in enumerate(files)
    ]
    chooser.value.set_files(named)
    page.wait_for_selector(f"#pictures button:nth-child({len(files)})")


def faults(page: Page) -> list[str]:
    """What axe-core has against the page as it is now."""
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in found]


class Shots:
    """Writes pictures where a folder was named."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def take(self, page: Page, name: str) -> None:
        if self.folder is not None:
            page.screenshot(path=str(self.folder / f"{name}.png"))
