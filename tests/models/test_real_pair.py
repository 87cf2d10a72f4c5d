"""The default pair, end to end: the real target, its shipped drafter, real prompts."""

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import DecodeConfig, Pair, SamplingConfig, Session, generate, load
from dflash_mlx.drafters.block_diffusion import SelectedPath
from dflash_mlx.engine.parity import first_difference
from dflash_mlx.session.stream import collect
from dflash_mlx.session.templates import prompt_tokens
from dflash_mlx.target.block import Block
from support.decoding import path_to, tree_of

pytestmark = pytest.mark.real

PROMPTS = [
    "Janet has 3 apples and buys 5 more. How many apples does she have?",
    "Write a Python function that returns the sum of two numbers.",
    "Name three primary colours.",
]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load()


def tokens_of(pair: Pair, prompt: str) -> list[int]:
    return prompt_tokens(pair.tokenizer, prompt, None, raw=False)


@pytest.mark.parametrize(
    ("method", "block_size"), [("dflash", 4), ("dflash", None), ("auto", None)]
)
def test_greedy_answers_are_the_plain_ones_up_to_near_ties_in_fewer_rounds(
    pair, method, block_size
):
    accepted = drafted = 0
    for prompt in PROMPTS:
        plain = generate(pair, prompt, DecodeConfig(method="none", max_tokens=32))
        answer = generate(pair, prompt, DecodeConfig(method, block_size, max_tokens=32))
        tokens = tokens_of(pair, prompt)
        difference = first_difference(pair.target, tokens, plain.tokens, answer.tokens)
        assert difference is None or difference.is_near_tie
        assert answer.statistics.rounds < plain.statistics.rounds
        accepted += answer.statistics.accepted[1]
        drafted += answer.statistics.drafted[1]
    assert method == "auto" or accepted / drafted > 0.35, (
        "the first position is right half the time"
    )


def test_a_random_tree_over_the_real_target_equals_its_own_paths(pair):
    rng = np.random.default_rng(0)
    prompt = tokens_of(pair, PROMPTS[0])
    cache = pair.target.new_cache()
    pair.target.forward(mx.array(prompt), cache, Block(len(prompt)))
    cache.commit(range(len(prompt)))
    tokens = [7, *rng.integers(1000, 40000, size=5).tolist()]  # 7: the anchor of `ids_of`
    tree = tree_of(tokens, [-1, 0, 0, 1, 1, 4])
    logits, _ = pair.target.forward(tree.ids(mx.array(tokens[:1])), cache, Block.of(tree))
    for node in range(len(tree)):
        path = [tokens[n] for n in path_to(tree, node)]
        alone = pair.target.model(mx.array([prompt + path]))[0, -1]
        assert np.abs(np.array(logits[node] - alone)).max() < 1e-3


def test_sampling_with_one_seed_gives_the_plain_answer(pair):
    sampling = SamplingConfig(temperature=0.7, top_p=0.95, seed=5)
    plain = generate(pair, PROMPTS[2], DecodeConfig("none", max_tokens=24, sampling=sampling))
    drafted = generate(pair, PROMPTS[2], DecodeConfig("dflash", max_tokens=24, sampling=sampling))
    assert drafted.tokens == plain.tokens
    greedy = generate(pair, PROMPTS[2], DecodeConfig("dflash", max_tokens=24))
    assert drafted.tokens != greedy.tokens


def test_a_follow_up_question_computes_only_its_own_tokens(pair):
    session = Session(pair, DecodeConfig("dflash", max_tokens=24))
    messages = [{"role": "user", "content": PROMPTS[0]}]
    first = prompt_tokens(pair.tokenizer, messages, None, raw=False)
    text = collect(session.stream(first)).text
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And if she eats one?"},
    ]
    second = prompt_tokens(pair.tokenizer, messages, None, raw=False)
    answer = collect(session.stream(second))
    assert answer.statistics.reused_tokens >= len(first)
    alone = collect(Session(pair, DecodeConfig("dflash", max_tokens=24)).stream(second))
    assert answer.tokens == alone.tokens


def test_a_stop_text_inside_the_answer_cuts_it(pair):
    whole = generate(pair, PROMPTS[1], DecodeConfig("dflash", max_tokens=24)).text
    stop = whole[20:24]
    answer = generate(pair, PROMPTS[1], DecodeConfig("dflash", max_tokens=24, stop=(stop,)))
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"


def test_an_answer_that_ends_by_itself_ends_with_the_stop_token(pair):
    prompt = "What is 2 + 2? Answer with a number."
    answer = generate(pair, prompt, DecodeConfig("dflash", max_tokens=200))
    assert answer.finish_reason == "stop"
    assert answer.tokens[-1] in pair.tokenizer.eos_token_ids
    assert pair.tokenizer.decode(list(answer.tokens[:-1])) == answer.text


def test_the_drafter_takes_part_in_the_session(pair):
    assert isinstance(Session(pair, DecodeConfig("dflash")).drafter, SelectedPath)
    assert (Session(pair).config.method, Session(pair).drafter.name) == ("ddtree", "ddtree")
    assert pair.drafter_name == "smollm2-135m-dflash"
