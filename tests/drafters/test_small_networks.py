"""Domino and P-EAGLE with tiny targets: answers are those of plain decoding, whatever is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.delta import collect
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.session import Session
from support.configs import config_with
from support.decoding import Strict, answer, finish
from support.drafter_formats import FORMATS, written
from support.grammars import SCHEMA, constraint, tiny_tokenizer
from support.hybrids import plain_answer, target_of
from support.reference_peagle import FORMATS as PARALLEL
from support.toys import Letters, prompt_of

TARGETS = ["llama", "llama_sliding", "qwen3_5", "falcon_h1"]
DRAFTED: dict[str, tuple[tuple[Any, Any], dict[str, dict[str, Any]]]] = {
    "domino": (
        FORMATS["domino"],
        {"dflash": {}, "dflash, fixed": {"block_size": 5}, "ddtree": {"budget": 12}, "d2sd": {}},
    ),
    "p-eagle": (
        PARALLEL["speculators, sliding"],
        {"eagle3": {}, "eagle3, fixed": {"block_size": 5}, "eagle3, tree": {"budget": 12}},
    ),
}
CASES = [(kind, method) for kind, (_, methods) in DRAFTED.items() for method in methods]
pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture
def pair_of(tmp_path):
    def get(kind: str, name: str) -> Pair:
        target, (raw, tensors) = target_of(name), DRAFTED[kind][0]
        raw = {**raw, "num_target_layers": target.num_layers}
        return Pair(target, Letters(), (written(tmp_path, raw, tensors, target),), "tiny")

    return get


def config_of(kind: str, method: str) -> DecodeConfig:
    settings = DRAFTED[kind][1][method]
    return config_with(method.partition(",")[0], max_tokens=12, **settings)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("kind", "method"), CASES)
def test_turns_with_kept_prefixes_equal_plain_decoding_from_the_beginning(
    pair_of, kind, method, name
):
    pair, config = pair_of(kind, name), config_of(kind, method)
    prefixes, said, drafted = PrefixCache(1 << 30), prompt_of(0, 300), 0
    for turn in range(3):
        told = collect(Session(pair, config, prefixes).stream(said))
        assert list(told.tokens) == plain_answer(pair.target, said, 12)
        assert told.statistics.reused_tokens >= (turn > 0) * 0.9 * (len(said) - 40)
        drafted += sum(told.statistics.drafted.values())
        said = [*said, *told.tokens, *prompt_of(turn + 1, 9)]
    edited = [*said[:150], *prompt_of(9, 20)]  # behind what windows have passed
    told = collect(Session(pair, config, prefixes).stream(edited))
    assert list(told.tokens) == plain_answer(pair.target, edited, 12)
    assert drafted > 0


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_answers_together_and_under_a_grammar_are_those_of_plain_decoding(
    pair_of, tmp_path, kind, method
):
    pair, config = pair_of(kind, "llama"), config_of(kind, method)
    scheduler = Scheduler(pair, observer=Strict())
    prompts = [prompt_of(seed, length) for seed, length in ((1, 20), (2, 7), (3, 41))]
    asked = [scheduler.submit(prompt, config) for prompt in prompts]
    said = finish(scheduler)
    for each, prompt in zip(asked, prompts, strict=True):
        assert list(collect(iter(said[each])).tokens) == plain_answer(pair.target, prompt, 12)
    tokenizer, schema = tiny_tokenizer(tmp_path), json.dumps(SCHEMA)
    found = [
        answer(pair.target, drafter, prompts[0], replace(config, max_tokens=30), ruled)
        for drafter in (make_drafter(pair, config), NoDraft())
        for ruled in [constraint(tokenizer, json_schema=schema)]
    ]
    assert found[0] == found[1] and len(found[0]) > 5
