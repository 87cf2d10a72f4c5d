"""The page of `dflash-serve` in headless Chromium, served by a model that follows a script.

    .venv/bin/pip install playwright axe-playwright-python    # and Chromium, as Debian packages it
    .venv/bin/python scripts/check_page.py [--browser PROGRAM] [--pictures FOLDER]

Prints a line for every check and ends with 1 if one fails. Accessibility is checked by axe-core,
all of its rules. The pictures are for somebody to look at.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from browsing import (  # noqa: E402
    PHONE,
    WIDE,
    Shots,
    ask,
    begin,
    faults,
    idle,
    pick,
    visit,
)
from playwright.sync_api import Browser, sync_playwright  # noqa: E402

import dflash_mlx  # noqa: E402, F401  (before anything imports mlx)
from dflash_mlx.core.config import DecodeConfig  # noqa: E402
from dflash_mlx.models.load import load  # noqa: E402
from dflash_mlx.vision.pictures import open_picture  # noqa: E402
from support import models, tiny_seeing  # noqa: E402
from support.hostile import hostile_text  # noqa: E402
from support.pictures import answered, picture, read_prompt, seeing  # noqa: E402
from support.serving import MODEL, Actor, Server, serving  # noqa: E402

models.CHARACTERS.extend("`~")  # which texts have here; tests have as many tokens as tiny models
tiny_seeing.FIRST = Actor.vocab_size = len(models.SPECIAL) + len(models.CHARACTERS)

LOOKS = ("light", "dark")
TAGS = {"ARTICLE", "H2", "H3", "P", "DIV", "PRE", "SPAN", "DETAILS", "SUMMARY", "SECTION"}
CUT = """() => {
  const box = document.querySelector("#rounds").getBoundingClientRect();
  const cut = ({ right, top }) => right > box.right + 1 || top < box.top - 1;
  const bars = [...document.querySelectorAll("#rounds span")];
  return bars.filter((bar) => cut(bar.getBoundingClientRect())).length;
}"""
BELOW = "log.scrollHeight - log.scrollTop - log.clientHeight"  # pixels under what is in sight
CONTROLS = {"model", "tinted", "new", "log", "words", "send", "race", "SUMMARY"}
KEY, NAMED = "s3cret", '<img src=x onerror="owned()">'
RHYME = "The fox saw the crow, and the crow saw the fox, and so the fox saw that the crow saw it. "
CODE = "Like this:\n\n```python\nfor i in range(10): print('" + "x" * 90 + "')\n```\n\nThat is all."
COLOURS, LARGE = ("red", "green", "blue"), (1600, 1000)
OWNED = "owned()"  # what every payload calls, or what it loads: nobody may
TEXTS = """
<script>owned()</script>  <img src=x onerror=owned()>  <svg onload=owned()>
<svg><script>owned()</script></svg>  <body onload=owned()>  <iframe src=//x.test></iframe>
<iframe srcdoc='<script>parent.owned()</script>'>  <a href=javascript:owned()>here</a>
<input autofocus onfocus=owned()>  <details open ontoggle=owned()>  <math><mi//xlink:href>
<video><source onerror=owned()></video>  <object data=javascript:owned()>  <embed src=//x>
<link rel=stylesheet href=//x.test/a.css>  <style>*{display:none}</style>  <base href=//x>
<meta http-equiv=refresh content='0;url=//x.test'>  <form action=//x.test><button>ok</form>
<marquee onstart=owned()>  <template><script>owned()</script></template>  <plaintext>
</p></article><script>owned()</script>  </textarea><script>owned()</script>
</title><script>owned()</script>  <!--<script>owned()</script>-->  <![CDATA[<b>x</b>]]>
&lt;script&gt;owned()&lt;/script&gt;  &#60;img src=x onerror=owned()&#62;  &amp;&nbsp;&#0;
javascript:owned()  data:text/html,<script>owned()</script>  '"><script>owned()</script>
`${owned()}`  {{constructor.constructor('owned()')()}}  <%= owned() %>
[x](javascript:owned())  ![x](//x.test/a.png)  <img src='//x.test/a.png'>  [[x]] **b** _i_ # h
{"content": "<b>"}  data: [DONE]  data: {"error": {"message": "no"}}  event: error  __proto__
<b id=words>  <p id=status class=error>The server is gone</p>  <img name=getElementById>
\\u003cscript>owned()  ```html↵<script>owned()</script>↵```↵<script>owned()</script>
~~~↵<svg onload=owned()>
"""  # two spaces apart; an arrow stands for the end of a line
MARKUP = tuple(each.replace("↵", "\n") for each in TEXTS.strip().replace("\n", "  ").split("  "))
HOSTILE = (*MARKUP, *(hostile_text(seed) for seed in range(10)))  # the latter only as questions


def act(prompt: str) -> str:
    """What is said: what was asked, or what it names."""
    asked = prompt.rpartition("[user]")[2]
    if asked in ("rhyme", "endless"):
        time.sleep(0.002)  # a row, so that an answer takes long enough to look at
    return {"rhyme": RHYME * 3, "endless": RHYME * 30, "code": CODE}.get(asked, asked)


# The checks


def answers_stream(browser: Browser, server: Server, shots: Shots) -> str:
    with visit(browser, server) as page:
        begin(page, "rhyme")
        words, lengths = "#log article:last-child .words", set[int]()
        while page.evaluate("document.body.matches('.busy')"):
            lengths.add(len(page.inner_text(words)))
        whole = page.inner_text(words)
        assert whole == (RHYME * 3).strip(), whole
        assert len(lengths) > 5, lengths
        assert float(page.inner_text("#length")) > 1 and page.inner_text("#legend li") != ""
        assert page.evaluate("document.activeElement.id") == "words"
    return f"seen at {len(lengths)} lengths"


def an_interrupted_answer_stops_the_work(browser: Browser, server: Server, shots: Shots) -> str:
    target: Any = server.pair.target
    with visit(browser, server) as page:
        for stop in (
            lambda: page.keyboard.press("Escape"),
            lambda: page.click("#stop"),
            page.close,
        ):
            begin(page, "endless")
            page.wait_for_selector("#log article:last-child .words p:not(:empty)")
            begun = time.monotonic()
            stop()
            while "dflash_decoding 0.0" not in server.get("/metrics").text:
                assert time.monotonic() - begun < 20, "it is still answering"
            seconds, passes = time.monotonic() - begun, target.passes
            time.sleep(0.3)
            assert target.passes == passes, "the model went on"
            if not page.is_closed():
                assert page.inner_text("#status") == "Stopped"
    return f"no pass after {seconds:.2f} s, by Esc, by Stop and by closing the tab"


def hostile_texts_are_text(browser: Browser, server: Server, shots: Shots) -> str:
    with visit(browser, server) as page:
        scripts, title = page.locator("script").count(), page.title()
        for text in HOSTILE:
            page.click("#new")
            said, shown = ask(page, text), page.text_content("#log .user p")
            assert shown == text.replace("\r\n", "\n").replace("\r", "\n"), (shown, text)
            if text in MARKUP and not text.startswith(("```", "~~~")):
                assert page.text_content("#log article:last-child .words") == text, (said, text)
            tags = set(
                page.evaluate("[...document.querySelectorAll('#log *')].map(e => e.tagName)")
            )
            assert tags <= TAGS, (tags - TAGS, text)
            assert page.title() == title and page.locator("script").count() == scripts
    return f"{len(HOSTILE)} as questions, {len(MARKUP)} of them as answers"


def names_and_errors_are_text(browser: Browser, _: Server, shots: Shots) -> str:
    with serving(act, name=(NAMED,), faults=True) as server, visit(browser, server) as page:
        page.wait_for_selector("#model option:nth-child(2)", state="attached")
        page.select_option("#model", NAMED)
        ask(page, "hello")
        assert page.text_content("#log article:last-child h2") == NAMED
        page.route("**/v1/chat/completions", lambda route: route.fulfill(
            status=400, json={"error": {"message": NAMED}}))  # fmt: skip
        begin(page, "hello")
        idle(page)
        assert page.text_content("#status") == NAMED
    return "a model's name and a server's refusal"


def axe_has_nothing_against_it(browser: Browser, server: Server, shots: Shots) -> str:
    count = 0
    for look in LOOKS:
        for place, size in (("wide", WIDE), ("phone", PHONE)):
            with visit(browser, server, viewport=size, color_scheme=look) as page:
                found = faults(page)
                ask(page, "rhyme")
                ask(page, "code")
                found += faults(page)
                shots.take(page, f"answer-{place}-{look}")
                page.check("#tinted")
                found += faults(page)
                shots.take(page, f"drafts-{place}-{look}")
                page.uncheck("#tinted")
                page.click("#server summary")
                page.fill("#words", "rhyme")
                page.click("#race")
                idle(page)
                found += faults(page)
                shots.take(page, f"race-{place}-{look}")
                assert not found, found
                count += 4
    return f"{count} states, light and dark, wide and {PHONE['width']} pixels"


def all_can_be_done_with_keys(browser: Browser, server: Server, shots: Shots) -> str:
    with visit(browser, server) as page:
        page.keyboard.type("two\nlines".partition("\n")[0])
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("lines")
        assert page.input_value("#words") == "two\nlines"
        reached, unseen = set[str](), set[str]()
        for _ in range(20):
            page.keyboard.press("Tab")
            name = page.evaluate("document.activeElement.id || document.activeElement.tagName")
            reached.add(name)
            seen = "getComputedStyle(document.activeElement).outlineStyle != 'none'"
            unseen |= set() if name == "BODY" or page.evaluate(seen) else {name}
        assert reached >= CONTROLS, CONTROLS - reached
        assert not unseen, unseen
        page.focus("#words")
        begin(page, "endless")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "stop"
        page.keyboard.press("Enter")
        idle(page)
        assert page.inner_text("#status") == "Stopped"
    return ", ".join(sorted(reached - {"BODY"}))


def a_phone_shows_all_of_it(browser: Browser, server: Server, shots: Shots) -> str:
    with visit(browser, server, viewport=PHONE, has_touch=True, is_mobile=True) as page:
        ask(page, "rhyme")
        ask(page, "code")
        assert page.evaluate(CUT) == 0, "the newest rounds are shown, and whole"
        page.check("#tinted")
        assert page.evaluate(BELOW) <= 1, "colours leave the end of the answer in sight"
        page.uncheck("#tinted")
        ask(page, "W" * 400)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        small = []
        for name in ("#model", "#tinted", "#new", "#words", "#send", "#race"):
            box = page.locator(name).bounding_box()
            assert box is not None, name
            right, bottom = box["x"] + box["width"], box["y"] + box["height"]
            assert box["x"] >= 0 and right <= PHONE["width"] and bottom <= PHONE["height"], box
            small += [name] if name != "#tinted" and box["height"] < 24 else []
        assert not small, small
        height = page.evaluate("document.querySelector('#log').clientHeight")
        assert height > PHONE["height"] // 3, height
    return f"{height} of {PHONE['height']} pixels are conversation"


def what_cannot_be_is_a_sentence(browser: Browser, server: Server, shots: Shots) -> str:
    with visit(browser, server) as page:  # a browser without streams
        page.evaluate("Object.defineProperty(Response.prototype, 'body', {get: () => undefined})")
        begin(page, "hello")
        idle(page)
        told = [page.inner_text("#status")]
        assert page.input_value("#words") == "hello", "the question is not lost"
    with visit(browser, server) as page:
        page.wait_for_selector("#model option", state="attached")
        page.context.set_offline(True)
        begin(page, "hello")
        idle(page)
        told.append(page.inner_text("#status"))
    with visit(browser, server, java_script_enabled=False) as page:
        told.append(page.inner_text("noscript"))
    assert "cannot read streams" in told[0] and "does not answer" in told[1], told
    assert "JavaScript" in told[2], told
    return "no streams, no server, no JavaScript"


def a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, _: Server, shots: Shots) -> str:
    with serving(act, key=(KEY,)) as server, visit(browser, server) as page:
        page.wait_for_selector("#lock[open]")
        found = faults(page)
        shots.take(page, "key")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#refused:not(:empty)")
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        assert ask(page, "hello") == "hello"
        page.reload()
        assert ask(page, "again") == "again"
        with visit(browser, server) as other:
            other.wait_for_selector("#lock[open]")
        assert not found, found
    return "a wrong one is refused, another tab is asked again"


def pictures_are_shown_taken_away_and_sent(browser: Browser, _: Server, shots: Shots) -> str:
    kept, digests = "#pictures img", list[str]()

    def read(target: Any, tokenizer: Any, messages: Any, *more: Any, **options: Any) -> Any:
        prompt = read_prompt(target, tokenizer, messages, *more, **options)
        digests[:] = [piece.digest for piece in prompt.pieces]
        return prompt

    with (
        patch("dflash_mlx.vision.prompts.read_prompt", read),
        serving(seeing(answered)) as server,
        visit(browser, server, viewport=PHONE) as page,
    ):
        pick(page, *(picture(colour, LARGE) for colour in COLOURS))
        page.wait_for_selector(f"{kept} >> nth=2")
        assert page.evaluate(f"[...document.querySelectorAll('{kept}')].every(e => e.width > 4)")
        found = faults(page)
        shots.take(page, "pictures")
        page.focus("#pictures button:nth-child(2)")
        page.keyboard.press("Enter")
        assert page.locator(kept).count() == 2
        assert page.evaluate("document.activeElement.id") == "words"
        assert ask(page, "these") == "2 for these"
        red, blue = (open_picture(picture(colour, LARGE), "it").digest for colour in COLOURS[::2])
        assert digests == [red, blue] and page.locator("#log .user img").count() == 2
        assert page.locator(kept).count() == 0 and ask(page, "and?") == "2 for and?"
        pick(page, picture()[:40])
        begin(page, "damaged")
        idle(page)
        assert "damaged" in page.inner_text("#status") and page.input_value("#words") == "damaged"
        page.click("#pictures button")
        assert ask(page, "without") == "2 for without"
        found += faults(page)
        shots.take(page, "pictures-sent")
        assert not found, found
    return "three chosen, one taken away, two read; a damaged one comes back with its question"


def a_tower_sees_what_was_chosen(browser: Browser, _: Server, shots: Shots) -> str:
    with (
        TemporaryDirectory() as folder,
        serving(act, DecodeConfig("ngram", max_tokens=8)) as server,
    ):
        tiny = tiny_seeing.write_folder(Path(folder) / "tiny")
        pair = server.worker.call(lambda: load(str(tiny))).result()
        server.models.by_name[MODEL].pair = pair
        with visit(browser, server) as page:
            pick(page, picture(size=LARGE))
            begin(page, "What is it?")
            idle(page)
            assert page.inner_text("#status") == "Done", page.inner_text("#status")
        assert pair.target.eyes.looked == 1
    return "of a tiny random Qwen3-VL"


CHECKS: tuple[Callable[[Browser, Server, Shots], str], ...] = (
    answers_stream,
    an_interrupted_answer_stops_the_work,
    hostile_texts_are_text,
    names_and_errors_are_text,
    axe_has_nothing_against_it,
    all_can_be_done_with_keys,
    a_phone_shows_all_of_it,
    what_cannot_be_is_a_sentence,
    a_key_is_asked_for_and_kept_in_the_tab,
    pictures_are_shown_taken_away_and_sent,
    a_tower_sees_what_was_chosen,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--browser", default="chromium", help="its program")
    parser.add_argument("--pictures", type=Path, help="a folder for pictures of the page")
    parser.add_argument("--only", help="checks whose name has this")
    given = parser.parse_args()
    if (program := shutil.which(given.browser)) is None:
        parser.error(f"there is no {given.browser}; install it, or name another with --browser")
    if given.pictures is not None:
        given.pictures.mkdir(parents=True, exist_ok=True)
    wrong = 0
    with sync_playwright() as tools, serving(act, DecodeConfig("ngram", max_tokens=3000)) as server:
        browser = tools.chromium.launch(executable_path=program, args=["--no-sandbox"])
        print(f"Chromium {browser.version}")
        for check in CHECKS:
            if given.only and given.only not in check.__name__:
                continue
            name = check.__name__.replace("_", " ")
            try:
                print(f"ok     {name}: {check(browser, server, Shots(given.pictures))}", flush=True)
            except Exception:
                wrong += 1
                print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
        browser.close()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
