"""What the chat keeps of conversations beside their files: /forget, /incognito, deleting, clean."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from threading import Event

import numpy as np
import pytest

from dflash_chat import main
from dflash_chat.backend import Backend
from dflash_chat.conversation import Conversation, Turn
from dflash_chat.draft_panel import round_sentence
from dflash_chat.keeper import Keeper
from dflash_chat.store import Store
from dflash_mlx.client import DecodeConfig, PairConfig, PrefixConfig, Question, prefix_cache
from dflash_mlx.drafters.continuations.suffixes import CODE
from dflash_mlx.session import session
from support.app_scripts import gated, in_chat, rounds_of
from support.models import write_model

SECRET = "the code of the safe in the cellar is kingfisher. " * 8
CONFIG = DecodeConfig("ngram", max_tokens=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("private") / "model"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the user's caches."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache")
    return tmp_path / "cache"


def start(model, **settings):
    """A backend as the chat makes it."""
    config = PrefixConfig(**settings)
    backend = Backend(partial(prefix_cache, config), session.earlier_texts(config))
    next(backend.load(PairConfig(model)))
    return backend


def ask(backend, text=SECRET, private=False):
    """Tokens that were read before, and whether any drafted one came of earlier texts."""
    asked = Question(({"role": "user", "content": text},), None, CONFIG)
    deltas = [*backend.answer(asked, None, private)]
    assert backend._earlier.finish(20) == ""
    recalled = any("said" in delta.proposal.tree.sources for delta in deltas)
    return deltas[-1].statistics.reused_tokens, recalled


def kept(cache):
    return [each for each in cache.rglob("*") if each.is_file()]


def test_what_was_said_and_read_helps_after_a_restart_until_it_is_forgotten(model, cache):
    first = start(model)
    assert ask(first) == (0, False)
    first.leave()
    assert {each.parent.name for each in kept(cache)} == {"lookup", "prefixes"}
    for each in kept(cache):
        assert each.stat().st_mode & 0o077 == 0 == each.parent.stat().st_mode & 0o077
    second = start(model)
    second._earlier.finish(20)
    reused, recalled = ask(second)
    assert reused > 300 and recalled
    (texts,) = cache.glob("lookup/*.texts")
    texts.with_suffix(".damaged").write_bytes(texts.read_bytes())
    (cache / "lookup" / ("0" * 24 + ".texts")).write_bytes(texts.read_bytes())  # another model's
    [*second.forget()]
    assert not kept(cache)
    assert ask(second) == (0, False), "nor is it in memory"
    [*second.forget()]
    second.leave()
    assert not kept(cache)


def test_it_is_forgotten_while_no_model_is_loaded_too(model, cache):
    first = start(model)
    ask(first)
    first.leave()
    assert kept(cache)
    config = PrefixConfig()
    nothing_loaded = Backend(partial(prefix_cache, config), session.earlier_texts(config))
    [*nothing_loaded.forget()]
    assert not kept(cache)


def test_of_an_incognito_conversation_nothing_stays(model, cache):
    backend = start(model)
    assert ask(backend, private=True) == (0, False)
    assert ask(backend, private=True)[0] > 300, "it goes on like others"
    [*backend.forget()]
    assert ask(backend, private=True) == (0, False)
    assert ask(backend) == (0, False), "others do not read on from it or draft from it"
    [*backend.forget()]
    ask(backend, "What is the time?")
    ask(backend, private=True)
    assert 0 < backend._earlier.of(*_named(backend)).nbytes < 8 * 260, "eight bytes a token"
    backend.leave()
    tokens = backend._responder.pair.tokenizer.encode("kingfisher", add_special_tokens=False)
    found = start(model)._earlier.of(*_named(backend)).find(_newest_first(tokens))
    assert max((match.length for match in found), default=0) < len(tokens) // 2, "chance alone"
    assert start(model)._responder.prefixes.files.folder == cache / "prefixes"
    assert ask(start(model))[0] == 0


def test_an_incognito_conversation_does_not_draft_from_others(model, cache):
    backend = start(model)
    ask(backend)
    assert ask(backend, private=True) == (0, False)


def _named(backend):
    pair = backend._responder.pair
    return pair.target.name, pair.tokenizer


def _newest_first(tokens):
    return np.array(tokens[::-1], CODE)


def test_where_nothing_is_looked_up_in_earlier_ones_none_is_kept(model, cache):
    backend = start(model, lookup_in="conversation", prefix_disk_gb=0)
    for _ in range(2):
        assert not ask(backend)[1]
    backend.leave()
    assert not kept(cache)
    before = start(model)
    ask(before)
    before.leave()
    assert ask(start(model, lookup_in="conversation", prefix_disk_gb=0)) == (0, False)
    [*backend.forget()]
    assert not kept(cache), "that of before it was switched off goes, too"


def test_another_model_does_not_keep_the_incognito_conversation(model, cache):
    backend = start(model)
    ask(backend, private=True)
    next(backend.load(PairConfig(model)))
    assert ask(backend, private=True) == (0, False)


@in_chat()
async def test_incognito_conversations_are_not_saved_and_the_next_ones_are(chat, app, backend):
    await chat.say("/incognito")
    assert "incognito: nothing of this is kept" in chat.text
    await chat.answered("What is the code of the safe?")
    await chat.say("/rename Safe")
    await chat.say("/retry")
    await chat.until(lambda: len(backend.requests) == 2)
    await chat.is_over()
    await chat.say("/edit")
    await chat.until(lambda: app.prompt.text == "What is the code of the safe?")
    assert "/open" not in chat.notices[-1], "where it is not"
    await chat.say("And of the other one?")
    await chat.is_over()
    assert backend.private == [True] * 3 and app.conversation.private
    assert await app.keeper.finish(20)
    assert not [*app.store.folder.glob("*.jsonl")] and not app.store.entries()
    for each in (each for each in app.store.folder.rglob("*") if each.is_file()):
        assert b"safe" not in each.read_bytes(), each
    await chat.say("/new")
    assert "incognito:" not in chat.text
    await chat.answered("Why?")
    assert backend.private[-1] is False and len(chat.saved) == 2


@in_chat()
async def test_forget_forgets_and_leaves_the_conversations(chat, app, backend):
    await chat.answered("Why?")
    await chat.say("/forget")
    await chat.until(lambda: backend.forgotten == 1)
    assert "no longer helps" in chat.text and len(chat.saved) == 2


@in_chat(lambda: gated(1000))
async def test_what_is_deleted_is_forgotten_though_an_answer_has_begun_meanwhile(
    chat, app, backend
):
    await chat.answered("Why?")
    disk = Event()
    app.keeper.ask(lambda store: disk.wait(60))
    await chat.say("/delete")
    await chat.press("y")
    backend.hold(1)
    await chat.begun("And then?")
    disk.set()
    assert await app.keeper.finish(20)
    await chat.goes_on()
    await chat.until(lambda: backend.forgotten == 1)


def test_a_conversation_that_is_not_saved_is_neither_listed_nor_missed(tmp_path):
    keeper = Keeper(Store(tmp_path / "talks"))
    talk = Conversation(turns=[Turn("user", SECRET)], private=True)
    assert keeper.save(talk, Turn("assistant", SECRET)).result(20) is False
    keeper.delete(talk).result(20)
    assert not keeper.unsaved and not Store(tmp_path / "talks").entries()
    assert talk.before_last_question().private, "nor is what /edit makes of it"


def test_clean_removes_what_was_said_before(model, cache, capsys):
    backend = start(model)
    ask(backend)
    backend.leave()
    for name in ("lookup", "prefixes"):
        assert [*cache.glob(f"{name}/*")]
        main.run(["clean", name, "--yes"])
        assert not [*cache.glob(f"{name}/*")] and name in capsys.readouterr().out
    assert not kept(cache)


def test_the_draft_view_tells_how_long_ago_accepted_tokens_were_said(monkeypatch):
    now = 1_800_000_000.0
    monkeypatch.setattr("dflash_chat.draft_panel.time.time", lambda: now)
    for seconds, told in (
        (30, "0 minutes ago"),
        (60, "1 minute ago"),
        (7200, "2 hours ago"),
        (86400, "1 day ago"),
        (-9, "0 minutes ago"),  # a clock that was set back
    ):
        (delta, *_) = rounds_of("one two three four")
        tree = delta.accepted.tree
        said = tuple(
            (now - seconds) * (node in delta.accepted.path[1:]) for node in range(len(tree))
        )
        accepted = replace(delta.accepted, tree=replace(tree, said=said))
        sentence = round_sentence(replace(delta, accepted=accepted))
        assert sentence.endswith(f"1 token said before, {told}."), sentence
        assert "said before" not in round_sentence(delta)
