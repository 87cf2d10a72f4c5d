"""The draft model learns while nobody types: when, from what, how often, and what is said."""

from __future__ import annotations

import time

import pytest

from dflash_chat import adapting
from dflash_chat.backend import Backend
from dflash_chat.conversation import Conversation, Turn
from dflash_chat.store import Store
from dflash_mlx.client import DFlashError, PairConfig
from dflash_mlx.train import adapt
from support.app_scripts import ANSWER, ScriptedBackend, in_chat
from support.models import write_drafter, write_model

SECRET = "kingfisher"


# When


class Learns(ScriptedBackend):
    """Learns in short pieces, so many in all, and says so behind the last."""

    pieces, learned, ended, read = 1_000_000, 0, 0, ""

    def learn(self, folder):
        self.read += "".join(file.read_text() for file in folder.glob("*.jsonl"))
        try:
            while self.learned < self.pieces:
                self.learned += 1
                time.sleep(0.005)
                yield None
            yield "it has learned"
        finally:
            self.ended += 1


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(adapting, "AFTER", 0.3)


@in_chat(lambda: Learns(), adapt=True)
async def test_it_learns_while_nobody_types_and_ends_at_a_key(chat, app, backend, soon):
    assert backend.loaded[0].adapted, "and drafts with what it learned before"
    await chat.until(lambda: backend.learned > 3)
    assert not backend.ended
    await chat.press("h")
    await chat.until(lambda: backend.ended)
    learned, app.prompt.text = backend.learned, ""
    await chat.answered()
    assert chat.shown_answer == ANSWER
    await chat.until(lambda: backend.learned > learned)


@in_chat(lambda: Learns())
async def test_it_is_off_unless_it_is_asked_for(chat, app, backend, monkeypatch):
    monkeypatch.setattr(adapting, "AFTER", 0.0)
    await chat.answered()
    await chat.pause(0.3)
    assert not backend.learned and not backend.loaded[0].adapted


@in_chat(lambda: Learns(), adapt=True)
async def test_what_is_said_incognito_is_never_read(chat, app, backend, soon):
    await chat.say("/incognito")
    await chat.answered(SECRET)
    await chat.until(lambda: backend.learned)
    await chat.say("/new")
    await chat.answered("an ordinary question")
    await app.keeper.finish(60)
    learned = backend.learned
    await chat.until(lambda: backend.learned > learned)
    assert "ordinary" in backend.read and SECRET not in backend.read


@in_chat(lambda: Learns(), adapt=True)
async def test_what_was_learned_is_one_line(chat, app, backend, soon):
    backend.pieces = 3
    await chat.until(lambda: chat.notices)
    assert chat.notices == ["it has learned."]


# What of


class Fake:
    """An adaptation that reads all rows, one a piece, and is kept where `helps`."""

    helps, problem, made = True, "", []

    def __init__(self, pair, drafter, rows):
        self.file, self.told, self.kept = drafter.parent / "delta", "1.5 to 2.5", False
        self.rows, self.read = rows, []
        self.made.append(self)

    def step(self):
        for row in self.rows:
            self.read.append(row)
            return "reading"
        if self.problem:
            raise DFlashError(self.problem, "try again")
        self.kept = self.helps
        return ""


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(adapt, "Adaptation", Fake)
    monkeypatch.setattr(adapting, "LEAST", 4)
    monkeypatch.setattr(Fake, "made", [])
    return Fake


@pytest.fixture
def folders(tmp_path):
    return str(write_model(tmp_path / "model")), str(write_drafter(tmp_path / "drafter"))


@pytest.fixture
def backend(folders):
    result = Backend()
    next(result.load(PairConfig(*folders)))
    return result


def talk(folder, model, answers):
    """Keep a conversation as the chat does."""
    turns = [Turn("user", f"{SECRET}?"), Turn("assistant", f"{SECRET}!")] * answers
    Store(folder).save(Conversation(f"{len([*folder.glob('*')])}", "", model, turns))


def test_it_goes_on_where_it_ended_and_says_what_was_kept(tmp_path, backend, folders, fake):
    talk(tmp_path / "talks", folders[0], 5)
    first = backend.learn(tmp_path / "talks")
    for _ in range(8):
        assert next(first) is None
    first.close()
    *pieces, told = backend.learn(tmp_path / "talks")
    (made,) = fake.made
    assert len(made.read) == 5 and 0 < len(pieces) < 5
    assert "1.5 to 2.5" in told and "--undo" in told and SECRET not in told
    assert [*backend.learn(tmp_path / "talks")] == [], "once"


def test_it_learns_again_with_twice_as_many_answers(tmp_path, backend, folders, fake):
    trained = []
    for answers in (3, 1, 3, 1, 8):
        talk(tmp_path / "talks", folders[0], answers)
        next(backend.load(PairConfig(*folders)))
        [*backend.learn(tmp_path / "talks")]
        trained.append(len(fake.made[-1].read))
    assert trained == [0, 4, 0, 8, 16]


def test_what_does_not_help_is_not_told_and_what_cannot_be_is(
    tmp_path, backend, folders, fake, monkeypatch
):
    talk(tmp_path / "talks", folders[0], 5)
    monkeypatch.setattr(fake, "helps", False)
    assert not any(backend.learn(tmp_path / "talks"))
    talk(tmp_path / "talks", folders[0], 5)
    monkeypatch.setattr(fake, "problem", "the memory is full")
    next(backend.load(PairConfig(*folders)))
    assert [*backend.learn(tmp_path / "talks")][-1] == "the memory is full; try again"


def test_without_a_draft_model_nothing_is_looked_for(tmp_path, folders, fake):
    backend = Backend()
    next(backend.load(PairConfig(folders[0])))
    talk(tmp_path / "talks", folders[0], 5)
    assert [*backend.learn(tmp_path / "talks")] == [] and not fake.made


def test_what_is_forgotten_is_not_learned_from(tmp_path, backend, folders, fake):
    talk(tmp_path / "talks", folders[0], 5)
    begun = backend.learn(tmp_path / "talks")
    for _ in range(8):
        next(begun)
    begun.close()
    [*backend.forget()]
    for file in (tmp_path / "talks").iterdir():
        file.unlink()
    assert not any(backend.learn(tmp_path / "talks"))
    assert not fake.made[-1].read and not fake.made[0].kept
