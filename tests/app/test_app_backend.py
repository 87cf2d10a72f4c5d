"""The worker's side of the chat on a tiny pair: loading, refusals, races."""

from dataclasses import replace

import pytest

from dflash_chat.backend import Backend, Loaded
from dflash_chat.race import Lane, RaceResult, RaceStep, result_of
from dflash_mlx import (
    DecodeConfig,
    DFlashError,
    Difference,
    PairConfig,
    Request,
    SamplingConfig,
    amount,
)
from dflash_mlx.models import available
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
    return Request(({"role": "user", "content": "hello"},), None, replace(CONFIG, **settings))


def text_of(backend):
    return "".join(delta.text for delta in backend.answer(request(), None))


def test_without_a_model_there_is_a_next_step():
    for events in (Backend().answer(request(), None), Backend().race(request())):
        with pytest.raises(DFlashError, match="/model"):
            next(events)


def test_a_drafter_that_does_not_fit_leaves_the_old_pair(backend, folders):
    before = text_of(backend)
    with pytest.raises(DFlashError, match="128"):
        next(backend.load(PairConfig(folders["model"], folders["wide"])))
    assert text_of(backend) == before


def test_what_does_not_fit_in_memory_with_its_drafters_is_refused(backend, folders, monkeypatch):
    target = available.needed_by(find_names(PairConfig(folders["model"])))
    monkeypatch.setattr(available, "available_memory", lambda: target)
    (event,) = backend.load(PairConfig(folders["model"]))
    assert event.pair.means.drafters == 0
    with pytest.raises(DFlashError, match=f", and {amount(target)} are there"):
        next(backend.load(PairConfig(folders["model"], folders["drafter"])))


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=0.9, seed=1)])
def test_a_race_decodes_both_ways_from_one_seed_and_compares_every_token(backend, sampling):
    *steps, result = backend.race(request(sampling=sampling))
    ends = {step.side: step for step in steps if step.finished}
    length = ends["plain"].tokens
    assert 0 < length == ends["drafted"].tokens
    assert all(isinstance(step, RaceStep) and step.seconds > 0 for step in steps)
    assert isinstance(result, RaceResult) and result.equal
    assert result.text.startswith(f"All {length} tokens are the same. ")
    plain, drafted = ("".join(s.text for s in steps if s.side == side) for side in ends)
    assert plain == drafted
    if sampling.temperature == 0:
        assert plain == text_of(backend) and length == 12


@pytest.mark.parametrize(
    ("settings", "step"),
    [
        ({"method": "none"}, "/method"),
        ({"sampling": SamplingConfig(0.9), "acceptance": "reject"}, "/settings"),
    ],
)
def test_a_race_in_which_nothing_could_be_compared_is_refused(backend, settings, step):
    with pytest.raises(DFlashError, match=step):
        next(backend.race(request(**settings)))


@pytest.mark.parametrize(
    ("difference", "sentence"),
    [
        (None, "All 10 tokens are the same. 2.00 times as fast"),
        (Difference(3, 1e-5), "up to token 3, where two tokens are all but tied (logits 1.0e-05"),
        (Difference(3, 0.7), "with logits 0.70 apart, which is no tie: please report it"),
        (Difference(3, None), "one answer ends there"),
    ],
)
def test_a_result_says_what_is_the_same_and_what_is_not(difference, sentence):
    plain = Lane("plain", iter(()), list(range(10)), 2.0, True)
    drafted = Lane("drafted", iter(()), list(range(10)), 1.0, True)
    result = result_of(plain, drafted, difference)
    assert sentence in result.text
    assert result.equal == (difference is None)
