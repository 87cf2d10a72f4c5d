"""Saving beside the chat: in order, the newest state, whatever the folder does."""

import errno
import os
import threading

import pytest

from dflash_chat.conversation import Conversation, Turn
from dflash_chat.keeper import Keeper
from dflash_chat.store import Store
from dflash_mlx import DFlashError
from dflash_mlx.system.files import replace_text
from support.app_scripts import ANSWER, answered, in_chat, notices, say, screen_text, until


class Hung:
    """A writer that waits, as for a folder on a network that is gone, until it is let go."""

    def __init__(self, monkeypatch):
        self.begun, self.goes, self.written = threading.Event(), threading.Event(), []
        monkeypatch.setattr("dflash_chat.store.replace_text", self.write)

    def write(self, file, text):
        self.begun.set()
        assert self.goes.wait(60)
        replace_text(file, text)
        self.written.append(text)


@pytest.fixture
def hung(monkeypatch):
    writer = Hung(monkeypatch)
    yield writer
    writer.goes.set()


def talk(*texts):
    return Conversation(turns=[Turn("user", text) for text in texts])


def test_of_what_waits_to_be_saved_the_newest_is_written_once_and_in_order(tmp_path, hung):
    keeper, first, second = Keeper(Store(tmp_path)), talk("one"), talk("two")
    futures = [keeper.save(first), keeper.save(second)]
    assert hung.begun.wait(60)
    for text in ("three", "four"):
        second.turns.append(Turn("user", text))
        futures.append(keeper.save(second))
    listed = keeper.ask(Store.entries)
    assert keeper.unsaved == ["one", "two"] and not futures[0].done()
    hung.goes.set()
    assert {entry.title for entry in listed.result(60)} == {"one", "two"}
    assert [future.result(60) for future in futures] == [False] * 4
    assert len(hung.written) == 2 and "four" in hung.written[1]
    assert keeper.unsaved == []


def test_what_the_disk_refuses_stays_unsaved_until_it_takes_it(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    keeper, conversation = Keeper(Store(tmp_path)), talk("one")
    monkeypatch.setattr("dflash_chat.store.replace_text", full)
    with pytest.raises(DFlashError, match="free some space"):
        keeper.save(conversation).result(60)
    assert keeper.unsaved == ["one"] and "No space" in keeper.problem
    monkeypatch.undo()
    keeper.save(conversation).result(60)
    assert keeper.unsaved == []


@in_chat()
async def test_a_folder_that_hangs_blocks_no_key_and_gets_the_newest_state(
    app, pilot, backend, hung
):
    await answered(app, pilot, "first")
    assert hung.begun.is_set() and hung.written == []
    await pilot.press("h", "i")
    assert app.prompt.text == "hi"
    app.prompt.text = ""
    await answered(app, pilot, "second")
    await say(app, pilot, "/retry")
    await say(app, pilot, "/open")
    await pilot.press("escape")
    assert [turn.content for turn in app.conversation.turns] == ["first", ANSWER, "second", ANSWER]
    hung.goes.set()
    await until(lambda: len(backend.requests) == 3 and app.listener.job is None, pilot)
    assert await app.keeper.finish(60)
    kept = {e.title: app.store.read(e.file).conversation for e in app.store.entries()}
    assert kept["first"].turns[-1].content == ANSWER and len(kept["first"].turns) == 4
    assert len(kept["first (2)"].turns) == 4
    assert not [notice for notice in notices(app) if "saved" in notice]
    assert "first" in screen_text(app)
