"""The worker's side of the chat on a tiny pair: loading, refusals, races."""

from dataclasses import replace
from functools import partial

import pytest

from dflash_chat.backend import Backend, Loaded
from dflash_mlx.client import (
    DecodeConfig,
    DFlashError,
    PairConfig,
    PrefixConfig,
    Question,
    amount,
    prefix_cache,
)
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models import downloads
from dflash_mlx.models.names import find_names
from support.models import write_drafter, write_model

CONFIG = DecodeConfig(max_tokens=12, method="dflash")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return {
        "model": str(write_model(root / "model")),
        "drafter": str(write_drafter(root / "drafter")),
        "wide": str(write_drafter(root / "wide", hidden_size=128)),
    }


@pytest.fixture
def backend(folders):
    result = Backend()
    (event,) = result.load(PairConfig(folders["model"], folders["drafter"]))
    assert isinstance(event, Loaded)
    return result


def request(**settings):
    return Question(({"role": "user", "content": "hello"},), None, replace(CONFIG, **settings))


def text_of(backend):
    return "".join(delta.text for delta in backend.answer(request(), None))


def test_without_a_model_there_is_a_next_step():
    for events in (Backend().answer(request(), None), Backend().race(request())):
        with pytest.raises(DFlashError, match="/model"):
            next(events)


def test_conversations_go_on_after_a_restart_until_they_are_forgotten(folders, tmp_path):
    place, question = tmp_path / "prefixes", "x" * 300

    def chat(**settings):
        backend = Backend(partial(prefix_cache, PrefixConfig(**settings), place))
        next(backend.load(PairConfig(folders["model"], folders["drafter"])))
        asked = replace(request(), messages=({"role": "user", "content": question},))
        (*_, last) = backend.answer(asked, None)
        return backend, last.statistics.reused_tokens

    first, reused = chat()
    assert reused == 0
    first.leave()
    second, reused = chat()
    assert reused >= 300
    list(second.forget())
    assert not list(place.iterdir())
    second.leave()
    third, reused = chat(prefix_disk_gb=0)
    third.leave()
    assert reused == 0 and not list(place.iterdir()) and not third.problem


def test_a_drafter_that_does_not_fit_leaves_the_old_pair(backend, folders):
    before = text_of(backend)
    with pytest.raises(DFlashError, match="128"):
        next(backend.load(PairConfig(folders["model"], folders["wide"])))
    assert text_of(backend) == before


def test_what_does_not_fit_in_memory_with_its_drafters_is_refused(backend, folders, monkeypatch):
    target = downloads.needed_by(find_names(PairConfig(folders["model"])))
    monkeypatch.setattr(downloads, "available_memory", lambda: target)
    (event,) = backend.load(PairConfig(folders["model"]))
    assert not event.pair.drafters
    with pytest.raises(DFlashError, match=f", and {amount(target)} are available"):
        next(backend.load(PairConfig(folders["model"], folders["drafter"])))


def test_the_timing_of_a_pair_ends_where_another_one_is_loaded(backend, folders, monkeypatch):
    monkeypatch.setattr(Pair, "calibrating", lambda pair, again: iter([(1, 3), (2, 3), (3, 3)]))
    events = backend.measure(False)
    assert next(events) == 1
    [*backend.load(PairConfig(folders["model"]))]
    assert [*events] == [], "it says nothing of the other pair"
