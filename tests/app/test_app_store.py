"""Conversations on disk: whole after every accident, and saved beside the chat."""

import errno
import os
import threading
import time

import pytest

from dflash_chat.conversation import UNTITLED, Conversation, Turn, title_of
from dflash_chat.keeper import Keeper
from dflash_chat.store import Store, export
from dflash_mlx import DFlashError
from dflash_mlx.system.files import replace_text
from support.app_scripts import ANSWER, fill_disk, in_chat


def talk(*pairs):
    turns = []
    for question, answer in pairs:
        turns += [Turn("user", question), Turn("assistant", answer, "stop", {"rounds": 3})]
    return Conversation(model="M", turns=turns)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "conversations")


def test_a_saved_conversation_is_read_as_it_was(store):
    conversation = talk(("Why?\nReally", "Because \x85\u2028 \U0001f600 \n."), ("And?", ""))
    conversation.turns.append(Turn("user", "unanswered"))
    conversation.title = "Reasons"
    store.save(conversation)
    store.save(conversation)
    file = store.file_of(conversation)
    opened = Store(store.folder).open(file)
    assert (opened.conversation, opened.problem) == (conversation, "")
    assert list(store.folder.iterdir()) == [file]
    assert len(file.read_text(encoding="utf-8").splitlines()) == 6, "each line is one JSON object"


def test_the_newest_conversation_is_listed_first_under_its_title(store):
    assert store.entries() == [], "there is no folder yet"
    first, second = talk(("one", "x")), talk(("two", "x"))
    store.save(first)
    store.save(second)
    old = time.time() - 100
    os.utime(store.file_of(first), (old, old))
    assert [entry.title for entry in store.entries()] == ["two", "one"]
    first.title = "renamed"
    store.rename(store.file_of(first), "renamed")
    assert [entry.title for entry in store.entries()] == ["renamed", "two"]
    store.delete(store.file_of(first))
    assert [entry.title for entry in store.entries()] == ["two"]
    store.save(first)
    assert [entry.title for entry in store.entries()] == ["renamed", "two"], "it was open elsewhere"


def damaged(store, change):
    conversation = talk(("one", "1"), ("two", "2"))
    store.save(conversation)
    file = store.file_of(conversation)
    file.write_bytes(change(file.read_bytes()))
    return file


@pytest.mark.parametrize(
    ("change", "turns", "line"),
    [
        (lambda data: data[:-20], 3, 5),
        (lambda data: data.replace(b'"role": "assistant"', b'"role": 7', 1), 1, 3),
        (lambda data: data.replace(b'"content": "two"', b'"text": "two"'), 2, 4),
        (lambda data: data.replace(b'{"rounds": 3}', b"[3]", 1), 1, 3),
        (lambda data: b"\x00\xff" + data, 4, 1),
        (lambda data: data.replace(b'"version": 1', b'"version": 0'), 4, 1),
        (lambda data: b"", 0, 1),
        (lambda data: os.urandom(5000), 0, 1),
        (lambda data: b"[1, 2]\n" + data, 0, 1),
        (lambda data: data + b"[" * 100_000, 4, 6),
    ],
)
def test_a_damaged_file_gives_what_stands_before_the_damage_and_is_kept(store, change, turns, line):
    file = damaged(store, change)
    before = file.read_bytes()
    opened = store.open(file)
    assert len(opened.conversation.turns) == turns
    assert f"line {line} of" in opened.problem
    assert file.with_suffix(".damaged").read_bytes() == before
    opened.conversation.turns.append(Turn("user", "on"))
    store.save(opened.conversation)
    assert store.open(file).problem == ""


@pytest.mark.parametrize(
    ("error", "step"),
    [("ENOSPC", "free some space"), ("EROFS", "make it writable"), ("EACCES", "make it writable")],
)
def test_full_disks_and_locked_folders_leave_the_old_file(store, monkeypatch, error, step):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    number, conversation = getattr(errno, error), talk(("a", "b"))
    store.save(conversation)
    whole = store.file_of(conversation).read_bytes()
    monkeypatch.setattr(os, "fsync", refuse)
    conversation.turns.append(Turn("user", "more"))
    with pytest.raises(DFlashError, match=f"cannot write to .*{os.strerror(number)}.*; {step}"):
        store.save(conversation)
    assert store.file_of(conversation).read_bytes() == whole
    assert list(store.folder.iterdir()) == [store.file_of(conversation)]


@pytest.mark.parametrize("renames", [False, True])
def test_two_windows_on_one_conversation_lose_nothing(store, renames):
    conversation = talk(("a", "b"))
    store.save(conversation)
    file = store.file_of(conversation)
    other = Store(store.folder)
    theirs = other.open(file).conversation
    theirs.turns.append(Turn("user", "from the other window"))
    other.save(theirs)
    assert store.read(file).conversation == theirs
    if renames:
        store.rename(file, "Rivers")
    conversation.turns.append(Turn("user", "from this window"))
    store.save(conversation)
    questions = sorted(store.read(e.file).conversation.questions[-1] for e in store.entries())
    assert questions == ["from the other window", "from this window"]


def test_what_vanishes_is_half_written_or_damaged_hides_no_other(store):
    conversation = talk(("a", "b"))
    store.save(conversation)
    file = store.file_of(conversation)
    file.with_name(f".new-1-{file.name}").write_bytes(file.read_bytes()[:-5])
    (store.folder / "gone.jsonl").symlink_to("nowhere")
    (store.folder / "damaged.jsonl").write_text("nonsense")
    listed = {(entry.title, entry.damaged) for entry in store.entries()}
    assert listed == {("a", False), (UNTITLED, True)}


def test_a_conversation_of_a_newer_version_is_called_that_and_kept(store):
    file = damaged(store, lambda data: data.replace(b'"version": 1', b'"version": 2'))
    newer, opened = file.read_bytes(), store.open(file)
    assert "newer dflash-chat" in opened.problem and "damaged;" not in opened.problem
    assert "4 messages were read" in opened.problem and len(opened.conversation.turns) == 4
    assert file.with_suffix(".damaged").read_bytes() == newer


def test_an_export_is_markdown_without_thoughts(tmp_path):
    export(talk(("Why?", "<think>hm</think>Because.")), str(tmp_path / "talk.md"))
    text = (tmp_path / "talk.md").read_text()
    assert text.startswith("# Why?\n")
    assert "## You\n\nWhy?" in text
    assert "## Model\n\nBecause." in text
    assert "hm" not in text
    with pytest.raises(DFlashError, match="cannot be written"):
        export(talk(("a", "b")), str(tmp_path / "none" / "talk.md"))


def test_a_title_is_the_first_line_of_the_first_question():
    told = {"Why?\nmore": "Why?", "x" * 90: "x" * 59 + "…", "": UNTITLED, "\n\n": UNTITLED}
    assert {text: title_of([Turn("user", text)]) for text in told} == told


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


def test_of_what_waits_to_be_saved_the_newest_is_written_once_and_in_order(tmp_path, hung):
    keeper, first, second = Keeper(Store(tmp_path)), talk(("one", "")), talk(("two", ""))
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
    keeper, conversation = Keeper(Store(tmp_path)), talk(("one", ""))
    fill_disk(monkeypatch)
    with pytest.raises(DFlashError, match="free some space"):
        keeper.save(conversation).result(60)
    assert keeper.unsaved == ["one"] and "No space" in keeper.problem
    monkeypatch.undo()
    keeper.save(conversation).result(60)
    assert keeper.unsaved == []


@in_chat()
async def test_a_folder_that_hangs_blocks_no_key(chat, app, backend, hung):
    await chat.answered("first")
    assert hung.begun.is_set() and hung.written == []
    await chat.press("h", "i")
    assert app.prompt.text == "hi"
    app.prompt.text = ""
    await chat.answered("second")
    await chat.say("/retry")
    await chat.say("/open")
    await chat.press("escape")
    assert [turn.content for turn in app.conversation.turns] == ["first", ANSWER, "second", ANSWER]
    hung.goes.set()
    await chat.until(lambda: len(backend.requests) == 3 and app.listener.job is None)
    assert await app.keeper.finish(60)
    kept = {e.title: app.store.read(e.file).conversation for e in app.store.entries()}
    assert kept["first"].turns[-1].content == ANSWER and len(kept["first"].turns) == 4
    assert len(kept["first (2)"].turns) == 4
    assert not [notice for notice in chat.notices if "saved" in notice]
    assert "first" in chat.text
