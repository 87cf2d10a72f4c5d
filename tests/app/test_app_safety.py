"""Texts of elsewhere on screen: they are read, and command nothing. Folders that do not answer."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pyte
import pytest
from rich.segment import Segment
from textual.color import Color

from dflash_chat.conversation import Conversation, Turn
from dflash_chat.keeper import Keeper
from dflash_chat.labels import label_of
from dflash_chat.open_screen import OpenScreen
from dflash_chat.problems import describe
from dflash_chat.screens import RowsScreen
from dflash_chat.status import Progress
from dflash_chat.store import Store
from dflash_chat.terminal import Harmless, assembled
from dflash_mlx import DFlashError
from support.app_scripts import ANSWER, ScriptedBackend, drive, in_chat, pair_of, until
from support.hostile import SEQUENCES, Watched, commands_in, hostile_text, state

HIGH, USUAL = (100, 250), (100, 60)  # the first shows a whole conversation at once
SEEDS, TURNS, IN_A_TURN = range(6), 10, 4  # and ten texts more of each seed: 300 in all


def painted(app) -> str:
    """All that the screen writes to the terminal, line by line."""
    return "\n".join(strip.render(app.console) for strip in app.screen._compositor.render_strips())


def obeyed(app, screen: pyte.Screen, stream: pyte.Stream) -> list[str]:
    """What of the painted screen commands a terminal, or leaves its state another one."""
    before, shown = state(screen), painted(app)
    stream.feed("\x1b[H" + shown.replace("\n", "\r\n") + "\x1b[0m")
    changed = [name for name, value in state(screen).items() if value != before[name]]
    return commands_in(shown) + changed


def test_hundreds_of_hostile_texts_are_shown_and_none_is_obeyed(tmp_path):
    """They are questions, answers and thoughts as they are read from a file and as they stream, a
    title in the head line, in the list and in a dialog, the name of a model, progress, an error.
    """
    found: dict[str, list[str]] = {}
    backend = ScriptedBackend([ANSWER])

    def watch(size, show):
        screen = Watched(*size)
        stream = pyte.Stream(screen)

        async def steps(chat, app):
            async def look(place: str) -> None:
                await chat.pause()
                if wrong := obeyed(app, screen, stream):
                    found[f"{place} of seed {seed}"] = wrong

            for seed in SEEDS:
                await show(chat, seed, look)

        drive(steps, tmp_path / "talks", backend, size)

    async def conversation(chat, seed, look):
        store = stored(tmp_path / f"talks-{seed}", seed)
        (entry,) = store.entries()
        await chat.app.show_conversation(store.open(entry.file).conversation)
        chat.app.pair = pair_of(hostile_text(f"{seed}/name"))
        chat.app.show_header()
        await look("conversation")
        assert chat.app.transcript.max_scroll_y == 0, "all of it is on screen"

    async def elsewhere(chat, seed, look):
        chat.app.keeper = Keeper(Store(tmp_path / f"talks-{seed}"))
        await chat.app.show_conversation(Conversation())
        await chat.say("/open")
        assert await chat.app.keeper.finish(60)
        await look("list")
        await chat.press("escape")
        backend.answers = [hostile_text(f"{seed}/answer")]
        await chat.answered("x" + hostile_text(f"{seed}/question"))
        chat.app.status.progress(Progress(hostile_text(f"{seed}/progress")))
        await chat.app.say(hostile_text(f"{seed}/error"), "error")
        await look("answer")
        rows = [(hostile_text(f"{seed}/row"), hostile_text(f"{seed}/value"))]
        chat.app.push_screen(RowsScreen("Figures", rows))
        await look("dialog")
        await chat.press("escape")

    watch(HIGH, conversation)
    watch(USUAL, elsewhere)
    assert found == {}, "by where and when: what a terminal would have obeyed"


def stored(folder: Path, seed: int) -> Store:
    """A store that holds one conversation of hostile texts."""
    texts = [
        "\n\n".join(hostile_text(f"{seed}/{turn}/{i}") for i in range(IN_A_TURN))
        for turn in range(TURNS)
    ]
    turns = [Turn(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
    turns[-1] = Turn("assistant", f"<think>{texts[-1]}</think>{hostile_text(seed)}")
    store = Store(folder)
    store.save(Conversation(title=hostile_text(f"{seed}/title"), turns=turns))
    return store


@pytest.mark.parametrize("text", ["plain", *SEQUENCES, "a\tb", "wide 漢字\x1b[2J", "a\nb"])
def test_a_line_keeps_its_width_and_loses_its_commands(text):
    before = Segment(text)
    (after,) = Harmless().apply([before], Color(0, 0, 0))
    assert (after is before) == (text == "plain"), "what is harmless stays the same object"
    assert commands_in(after.text) == [] and "\n" not in after.text and "\t" not in after.text
    assert after.cell_length == before.cell_length


@in_chat()
async def test_styles_behind_characters_left_out_stay_at_their_words(chat, app, backend):
    """Textual counts control characters that it leaves out, and its styles fall off the end."""
    rung = ["\x07" * 30 + "[x](http://y)", "\x07" * 30 + "`code`"]
    turns = [Turn("user", "?"), Turn("assistant", rung[0])]
    await app.show_conversation(Conversation(turns=turns))
    backend.answers = [rung[1]]
    await chat.answered("and?")
    await chat.shows("code")
    assert "x" in chat.text.split()
    content = assembled([("\x07\x07\x07", "bold"), ("b", "italic")])
    assert [(span.start, span.end) for span in content.spans][-1] == (0, 1)


ADVICE = {  # of a command line, and of the chat
    "name one with --model": "name one with /model",
    "use --method none": "use /method none",
    "name one with --drafter, or use --method none": "name one with /drafter, or use /method none",
    "raise --max-tokens": "raise “Longest answer” in /settings",
    "leave out --kv-bits": "leave out --kv-bits",
    "name one with --conversations": "name one with --conversations",
}


def test_advice_of_a_command_line_becomes_advice_for_the_chat():
    for step, told in ADVICE.items():
        assert describe(DFlashError("models--Qwen--4B", step)) == f"models--Qwen--4B; {told}"
    error = DFlashError("top_k is 3", "choose less", "top_k")
    assert describe(error) == f"{label_of('top_k')} is 3; choose less"


@pytest.fixture
def talks(tmp_path):
    """The folder of a chat, with a pipe and a folder among its conversations."""
    store = Store(tmp_path / "talks")
    store.save(Conversation(turns=[Turn("user", "one"), Turn("assistant", "two")]))
    os.mkfifo(store.folder / "pipe.jsonl")
    (store.folder / "folder.jsonl").mkdir()
    return store


def test_what_is_no_file_is_no_conversation(talks):
    assert [entry.title for entry in talks.entries()] == ["one"]
    with pytest.raises(DFlashError, match=r"pipe.jsonl cannot be read \(it is not a file\)"):
        talks.open(talks.folder / "pipe.jsonl")


@in_chat()
async def test_a_silent_folder_does_not_stop_the_screen(chat, app, talks, monkeypatch):
    answers = threading.Event()
    entries = Store.entries

    def slow(store):
        answers.wait(60)
        return entries(store)

    monkeypatch.setattr(Store, "entries", slow)
    app.prompt.text = "/open"
    app.prompt.post_message(app.prompt.Sent("/open"))
    await until(lambda: isinstance(app.screen, OpenScreen), Loop)
    assert not answers.is_set(), "the screen runs while the folder is waited for"
    answers.set()
    await chat.shows("one")
    assert "pipe" not in chat.text


class Loop:
    """A pilot that waits for no widget."""

    @staticmethod
    async def pause(delay=0.0):
        await asyncio.sleep(delay)
