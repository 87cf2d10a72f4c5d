"""Texts of elsewhere on screen: they are read, and command nothing. Folders that do not answer."""

import asyncio
import os
import threading

import pytest
from rich.segment import Segment
from textual.color import Color

from dflash_chat.conversation import Conversation, Turn
from dflash_chat.labels import label_of
from dflash_chat.open_screen import OpenScreen
from dflash_chat.problems import describe
from dflash_chat.store import Store
from dflash_chat.terminal import Harmless, assembled
from dflash_mlx import DFlashError
from support.app_hostile import EACH, torment
from support.app_scripts import answered, in_chat, screen_text, until
from support.hostile import SEQUENCES, commands_in


def test_hundreds_of_hostile_texts_are_shown_and_none_is_obeyed(tmp_path):
    seeds = range(6)
    assert len(seeds) * EACH >= 300
    assert torment(tmp_path, seeds) == {}


@pytest.mark.parametrize("text", ["plain", *SEQUENCES, "a\tb", "wide 漢字\x1b[2J", "a\nb"])
def test_a_line_keeps_its_width_and_loses_its_commands(text):
    before = Segment(text)
    (after,) = Harmless().apply([before], Color(0, 0, 0))
    assert (after is before) == (text == "plain"), "what is harmless stays the same object"
    assert commands_in(after.text) == [] and "\n" not in after.text and "\t" not in after.text
    assert after.cell_length == before.cell_length


@in_chat()
async def test_styles_behind_characters_that_are_left_out_stay_where_their_words_are(
    app, pilot, backend
):
    """Textual counts control characters that it leaves out, and its styles fall off the end."""
    rung = ["\x07" * 30 + "[x](http://y)", "\x07" * 30 + "`code`"]
    turns = [Turn("user", "?"), Turn("assistant", rung[0])]
    await app.show_conversation(Conversation(turns=turns))
    backend.answers = [rung[1]]
    await answered(app, pilot, "and?")
    await until(lambda: "code" in screen_text(app), pilot)
    assert "x" in screen_text(app).split()
    content = assembled([("\x07\x07\x07", "bold"), ("b", "italic")])
    assert [(span.start, span.end) for span in content.spans][-1] == (0, 1)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            DFlashError("x is missing", "name one with --model"),
            "x is missing; name one with /model",
        ),
        (DFlashError("no", "use --method none"), "no; use /method none"),
        (
            DFlashError("top_k is 3", "choose less", "top_k"),
            f"{label_of('top_k')} is 3; choose less",
        ),
        (
            DFlashError("no", "name one with --drafter, or use --method none"),
            "no; name one with /drafter, or use /method none",
        ),
        (DFlashError("no", "raise --max-tokens"), "no; raise “Longest answer” in /settings"),
        (DFlashError("no", "leave out --kv-bits"), "no; leave out --kv-bits"),
        (DFlashError("models--Qwen--4B", "look into it"), "models--Qwen--4B; look into it"),
        (DFlashError("no", "name one with --conversations"), "no; name one with --conversations"),
    ],
)
def test_advice_of_a_command_line_becomes_advice_for_the_chat(said, told):
    assert describe(said) == told


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
    with pytest.raises(DFlashError, match=r"pipe.jsonl cannot be read \(it is no file\)"):
        talks.open(talks.folder / "pipe.jsonl")


@in_chat()
async def test_a_folder_that_does_not_answer_does_not_stop_the_screen(
    app, pilot, backend, talks, monkeypatch
):
    answers = threading.Event()
    entries = Store.entries

    def slow(store):
        answers.wait(60)
        return entries(store)

    monkeypatch.setattr(Store, "entries", slow)
    app.prompt.text = "/open"
    app.prompt.post_message(app.prompt.Sent("/open"))
    await until(lambda: isinstance(app.screen, OpenScreen), pilot=Loop)
    assert not answers.is_set(), "the screen runs while the folder is waited for"
    answers.set()
    await until(lambda: "one" in screen_text(app), pilot)
    assert "pipe" not in screen_text(app)


class Loop:
    """A pilot that waits for no widget."""

    @staticmethod
    async def pause(delay=0.0):
        await asyncio.sleep(delay)
