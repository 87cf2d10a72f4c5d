"""With an assistant of Gemma 4 answers stay the target's, whatever is kept, cut or shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.drafters.autoregressive import DrawnChain
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine import verify
from dflash_mlx.engine.prefix_files import PrefixFiles
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.session import Session, collect
from support.assistant_formats import CASES
from support.assistants import few_tokens
from support.configs import config_with
from support.decoding import Strict, answer, answer_rounds, finish, tokens_in
from support.hybrids import forward, plain_answer
from support.law import chi_square
from support.pairs import assistant_pair
from support.toys import Letters, prompt_of

PLENTY = 10**9  # bytes
USES: dict[str, dict[str, Any]] = {
    "as many as pay": {},
    "a tree": {"budget": 12, "branches": 3},
    "a deep tree": {"budget": 30, "branches": 5},
    "a chain": {"block_size": 5},
}
pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    return assistant_pair(tmp_path_factory.mktemp("pair"), request.param, Letters())


def config_of(name: str, temperature: float = 0.0, **more: Any) -> DecodeConfig:
    sampling = SamplingConfig(temperature, seed=3)
    return config_with(
        "assistant", **{"max_tokens": 12, "sampling": sampling, **USES[name], **more}
    )


def said_by(session: Session, prompt: list[int]) -> tuple[list[int], int]:
    """An answer, and how many tokens of its prompt were there already."""
    found = collect(session.stream(prompt))
    return list(found.tokens), found.statistics.reused_tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_those_of_plain_decoding_and_some_drafts_are_right(pair, temperature):
    """Of prompts within the windows and far longer than these."""
    accepted = 0
    for seed, length in enumerate((1, 9, 300)):
        prompt = prompt_of(seed, length)
        plain = replace(config_of("a chain", temperature), method="none")
        expected = answer(pair.target, NoDraft(), prompt, plain)
        for name in USES:
            found = collect(Session(pair, config_of(name, temperature)).stream(prompt))
            assert list(found.tokens) == expected
            accepted += sum(found.statistics.accepted.values())
    assert accepted > 0


@pytest.mark.parametrize("name", ["a tree", "a chain"])
def test_a_second_turn_reads_one_token_again_and_a_branch_parts_from_the_middle(pair, name):
    prefixes, prompt = PrefixCache(PLENTY), prompt_of(0, 600)
    first, reused = said_by(Session(pair, config_of(name), prefixes), prompt)
    assert reused == 0
    said_by(Session(pair, config_of(name), prefixes), prompt_of(1, 50))  # another conversation
    before = [*prompt, *first]
    follow_up, other = [*before, *prompt_of(2, 20)], [*prompt[:580], *prompt_of(3, 9)]
    for asked, least in ((follow_up, 611 - 1), (other, 580 - 1), (prompt, 599 - 1)):
        found, reused = said_by(Session(pair, config_of(name), prefixes), asked)
        assert found == plain_answer(pair.target, asked, 12)
        assert reused >= least


def test_after_a_restart_a_conversation_goes_on(pair, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_mlx.engine.prefix_files.SPARE", 0)

    def session() -> Session:
        prefixes = PrefixCache(PLENTY, PrefixFiles(tmp_path, PLENTY))
        return Session(pair, config_of("a tree"), prefixes)

    first, prompt = session(), prompt_of(4, 300)
    said = [*prompt, *said_by(first, prompt)[0]]
    first.prefixes.save()
    question = [*said, *prompt_of(5, 9)]
    found, reused = said_by(session(), question)
    assert found == plain_answer(pair.target, question, 12) and reused >= 0.95 * len(said)


def test_several_at_once_answer_as_each_does_alone(pair):
    scheduler = Scheduler(pair, observer=Strict())
    prompts = [prompt_of(i, 7 + 30 * i) for i in range(4)]
    uses = [config_of(name, heat) for name, heat in zip(USES, (0.0, 0.8, 0.0, 0.8), strict=True)]
    asked = [scheduler.submit(p, c) for p, c in zip(prompts, uses, strict=True)]
    said = finish(scheduler)
    for each, prompt, use in zip(asked, prompts, uses, strict=True):
        assert collect(iter(said[each])).tokens == collect(Session(pair, use).stream(prompt)).tokens


@pytest.mark.parametrize("bits", [4, 8])
def test_answers_stay_where_keys_and_values_are_quantised(tmp_path, bits):
    pair = assistant_pair(tmp_path, "small", Letters())
    pair.target.kv_bits = bits
    prompt, accepted = prompt_of(6, 60), 0
    for name in ("a deep tree", "a chain"):
        found = collect(Session(pair, config_of(name, max_tokens=30)).stream(prompt))
        assert list(found.tokens) == plain_answer(pair.target, prompt, 30)
        accepted += sum(found.statistics.accepted.values())
    assert accepted > 0


# Laws

LENGTH, PROMPT = 4, [0, 1, 2, 3, 2, 1, 0, 2, 2, 3]  # tokens of an answer, and what is before


@pytest.fixture(scope="module", params=["dense", "small"])
def few(request, tmp_path_factory):
    """A target with so few tokens that many drafts are right, and its assistant."""
    return few_tokens(tmp_path_factory.mktemp("few"), request.param)


def law_of(target: Any, temperature: float) -> dict[tuple[int, ...], float]:
    """All answers of the target alone, each with its probability."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for said, chance in law.items():
            logits = forward(target, target.new_cache(), [*PROMPT, *said])[-1]
            p = np.exp(np.array(logits, np.float64) / temperature)
            longer |= {(*said, token): chance * share for token, share in enumerate(p / p.sum())}
        law = longer
    return law


def distance(few: Any, temperature: float, weighed: bool = False) -> tuple[float, float]:
    """Of answers with many seeds from the enumerated law, in standard deviations.

    And how many drafted tokens were kept in an answer.
    """
    (target, model), answers, kept = few, [], 0
    for seed in range(160):
        sampling = SamplingConfig(temperature, seed=seed)
        use = DecodeConfig("assistant", acceptance="reject", sampling=sampling, max_tokens=LENGTH)
        drafter = DrawnChain(model, 4, sampling, weighed)
        found = [each.accepted for each in answer_rounds(target, drafter, PROMPT, use)]
        answers.append(tuple(tokens_in(found)))
        kept += sum(len(each.path) - 1 for each in found)
    return chi_square(law_of(target, temperature), answers), kept / len(answers)


@pytest.mark.parametrize(("temperature", "weighed"), [(0.7, False), (1.0, False), (1.0, True)])
def test_drawn_drafts_follow_the_law_of_the_target(few, temperature, weighed):
    far, kept = distance(few, temperature, weighed)
    assert far < 4 and kept > 0.3


def test_the_law_test_notices_a_wrong_rule(few, monkeypatch):
    monkeypatch.setattr(verify, "remainder", lambda p, q: p)
    assert distance(few, 1.0)[0] > 4
