"""Conversations on disk: whole after every accident."""

import os
import time

import pytest

from dflash_chat.conversation import UNTITLED, Conversation, Turn, title_of
from dflash_chat.store import Store, export
from dflash_mlx import DFlashError


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


def test_a_folder_that_cannot_be_written_is_a_sentence_with_a_next_step(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / "file" / "conversations")
    with pytest.raises(DFlashError, match=r"cannot write to .*; make it writable, or"):
        store.save(talk(("a", "b")))
    with pytest.raises(DFlashError, match="cannot read"):
        Store(tmp_path / "file").entries()


def test_a_full_disk_leaves_the_old_file(store, monkeypatch):
    conversation = talk(("a", "b"))
    store.save(conversation)
    whole = store.file_of(conversation).read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    conversation.turns.append(Turn("user", "more"))
    with pytest.raises(DFlashError, match="No space left on device"):
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


def test_a_conversation_that_another_window_deleted_is_saved_again(store):
    conversation = talk(("a", "b"))
    store.save(conversation)
    store.delete(store.file_of(conversation))
    store.save(conversation)
    assert [entry.title for entry in store.entries()] == ["a"]


def test_an_export_is_markdown_without_thoughts(tmp_path):
    export(talk(("Why?", "<think>hm</think>Because.")), str(tmp_path / "talk.md"))
    text = (tmp_path / "talk.md").read_text()
    assert text.startswith("# Why?\n")
    assert "## You\n\nWhy?" in text
    assert "## Model\n\nBecause." in text
    assert "hm" not in text
    with pytest.raises(DFlashError, match="cannot be written"):
        export(talk(("a", "b")), str(tmp_path / "none" / "talk.md"))


@pytest.mark.parametrize(
    ("text", "title"),
    [("Why?\nmore", "Why?"), ("x" * 90, "x" * 59 + "…"), ("", UNTITLED), ("\n\n", UNTITLED)],
)
def test_a_title_is_the_first_line_of_the_first_question(text, title):
    assert title_of([Turn("user", text)]) == title
