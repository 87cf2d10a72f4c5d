"""Pictures of the chat, compared character by character and colour by colour.

After a change that is meant, look at the new pictures and keep them:

    DFLASH_CHAT_SNAPSHOTS=write scripts/test tests/app/test_app_snapshots.py

The pictures in docs/ are others: `scripts/pictures.py` takes them of real answers.
"""

from __future__ import annotations

import base64
import os
import re
import time
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fontTools.ttLib import TTFont
from pictures import moving, picture, with_letters

from dflash_chat.race_screen import RaceScreen
from dflash_mlx.client import DFlashError, RaceResult
from support.app_scripts import ANSWER, ScriptedBackend, drive, race_of

PICTURES = Path(__file__).parents[1] / "snapshots"
PATIENCE = 15.0  # seconds until a screen that looks otherwise is taken for changed
SETTLED = 2.0  # seconds after which a picture that is to be kept is taken
LARGE, SMALL, TINY = (120, 40), (80, 24), (40, 12)
QUESTION = "Which two rivers meet in Mainz? Add a Python function that lists them."
THOUGHT = "<think>Mainz lies where the Main flows into the Rhine.</think>"
RESULT = RaceResult(
    "All 37 tokens are the same. 2.00 times as fast as plain decoding on this question.", True, 2.0
)


async def stream(chat, rounds):
    """Ask, and stop the scripted engine after so many rounds."""
    chat.backend.hold(0)
    await chat.say(QUESTION)
    chat.backend.gate.release(rounds)
    await chat.reaches(rounds)
    await chat.until(lambda: not chat.app.listener.dirty)


async def idle(chat):
    pass


async def streaming(chat):
    await chat.answered("Hello!")
    await stream(chat, 5)


async def draft_view(chat):
    await chat.press("f2")
    await stream(chat, 4)


async def race(chat):
    chat.backend.race_steps = [*race_of(f"{ANSWER}\n\n{ANSWER}", 37), RESULT]
    await chat.say(f"/race {QUESTION}")
    await chat.until(lambda: isinstance(chat.app.screen, RaceScreen) and chat.app.screen.over)


async def error(chat):
    await chat.answered(QUESTION)
    chat.backend.loads = [
        DFlashError(
            "'Qwen/Qwen3-4b' is neither a folder nor a public model",
            "give a local folder or a Hugging Face id like owner/name with --model",
        )
    ]
    await chat.say("/model Qwen/Qwen3-4b")
    await chat.until(lambda: chat.app.query(".notice"))


async def prefill(chat):
    chat.backend.prefills = [(1536, 4096)]
    await chat.say(QUESTION)
    await chat.until(lambda: chat.app.query_one("#progress").display)


async def settings(chat):
    await chat.say("/settings")


# name, size, what to do and theme
CASES = [
    ("welcome-120x40", LARGE, idle, "dark"),
    ("welcome-80x24", SMALL, idle, "light"),
    ("streaming-120x40", LARGE, streaming, "dark"),
    ("streaming-80x24", SMALL, streaming, "light"),
    ("draft-view-120x40", LARGE, draft_view, "dark"),
    ("draft-view-80x24", SMALL, draft_view, "light"),
    ("race-120x40", LARGE, race, "dark"),
    ("error-120x40", LARGE, error, "light"),
    ("settings-80x24", SMALL, settings, "dark"),
    ("prefill-40x12", TINY, prefill, "dark"),
]


async def settled_picture(chat, expected: str | None) -> str:
    """The picture with every text scrolled to its end: the expected one, or what is left.

    A busy machine can make the screen rest half-way, so another picture gets more time.
    """

    def at_end():
        scrolls = chat.app.screen.query(".side VerticalScroll")
        return all(scroll.scroll_y >= scroll.max_scroll_y for scroll in scrolls)

    late = time.monotonic() + (PATIENCE if expected else SETTLED)
    while True:
        await chat.until(at_end)
        await chat.wait_for_animation()
        now = picture(chat.app)
        if now == expected or time.monotonic() > late:
            return now
        await chat.pause(0.05)


@pytest.mark.parametrize(("name", "size", "steps", "theme"), CASES)
def test_the_screen_looks_as_in_its_picture(name, size, steps, theme, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dflash_chat.chat_app.MAC", False)
    file = PICTURES / f"{name}.svg"
    writes = os.environ.get("DFLASH_CHAT_SNAPSHOTS") == "write"
    expected = None if writes else file.read_text(encoding="utf-8")
    pictures = []

    async def take(chat, app):
        app.prompt.cursor_blink = False
        await steps(chat)
        pictures.append(await settled_picture(chat, expected))
        await app.action_stop()
        await chat.goes_on()

    drive(take, tmp_path / "talks", ScriptedBackend([THOUGHT + ANSWER]), size, theme=theme)
    (now,) = pictures
    assert len(now) < 200_000
    assert "url(" not in now.replace("url(#", ""), "it would fetch something"
    if writes:
        file.parent.mkdir(exist_ok=True)
        file.write_text(now, encoding="utf-8")
    elif now != expected:
        other = tmp_path / file.name
        other.write_text(now, encoding="utf-8")
        pytest.fail(f"{file.name} has changed, see {other}; the module's head says how to keep it")


def test_a_moving_picture_shows_each_frame_in_turn_and_the_last_where_nothing_may_move():
    frame = '<svg viewBox="0 0 9 9"><text>{}</text></svg>'
    svg = moving([(5.0, frame.format("a")), (6.0, frame.format("b"))], hold=3.0)
    root = ElementTree.fromstring(svg)
    first, last = root.findall("{http://www.w3.org/2000/svg}g")
    assert (first[0].text, last[0].text) == ("a", "b")
    assert (first.get("visibility"), last.get("visibility")) == ("hidden", None)
    rules = re.findall(r"@keyframes f(\d)\{(.*?\})\}", svg)
    assert dict(rules) == {
        "0": "0.00%{visibility:visible}25.00%{visibility:hidden}",
        "1": "0%{visibility:hidden}25.00%{visibility:visible}",
    }
    assert "4.00s" in svg, "one second and three"


def test_a_picture_has_the_letters_that_it_shows_in_both_weights():
    style = "<style>.a { font-family: Fira Code, monospace; } .b { font-family: arial; }</style>"
    svg = with_letters(f'<svg>{style}<text x="0">tok/s &#x2581;</text><text>✓&amp;</text></svg>')
    assert "Fira" not in svg and "arial" not in svg and ElementTree.fromstring(svg) is not None
    fonts = re.findall(r"font-weight:(\w+);src:url\(data:font/woff;base64,([^)]+)\)", svg)
    assert [weight for weight, _ in fonts] == ["normal", "bold"]
    for _, data in fonts:
        held = set(TTFont(BytesIO(base64.b64decode(data))).getBestCmap())
        assert held == set(map(ord, "tok/s ▁✓&"))
