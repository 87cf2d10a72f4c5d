"""The default pair, end to end: the real target, its shipped drafter, real prompts."""

import pytest

from dflash_mlx import DecodeConfig, Pair, generate, load
from dflash_mlx.engine.parity import first_difference
from dflash_mlx.session.templates import prompt_tokens

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
