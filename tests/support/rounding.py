"""A target whose passes differ by width, and answers from it."""

import mlx.core as mx

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.verifier.model import Target
from support import decoding
from support.families import make_model
from support.toys import foretold, prompt_of

TOKENS = 48
LOOSE = DecodeConfig("dflash", max_tokens=TOKENS)
EXACT = DecodeConfig("dflash", max_tokens=TOKENS, exact=True)
FAMILIES = {"llama": 0.003, "llama_sliding": 0.003, "gemma3_text": 0.01}  # size of the rounding


class Rounding(Target):
    """A target whose passes over several rows embed every token a little differently.

    As with other orders of summation, logits, keys and values all differ from a one-row pass's.
    """

    def __init__(self, family: str, size: float, seed: int = 0) -> None:
        super().__init__(make_model(family, seed), 400, family)
        table = self.embedding()
        self._exact = table.weight
        noise = mx.random.normal(table.weight.shape, key=mx.random.key(9))
        self._rough = self._exact
        self.rows: list[int] = []
        assert self.joins  # as long as widths do not matter
        self._rough = table.weight * (1 + size * noise)
        self.plain: dict[int, list[int]] = {}

    def _together(self, sequences, aux_layers):
        self.rows.append(sum(each.block.rows for each in sequences))
        self.embedding().weight = self._rough
        return super()._together(sequences, aux_layers)

    def forward(self, tokens, cache, block, aux_layers=(), embeddings=None):
        self.rows.append(block.rows)
        self.embedding().weight = self._exact if block.rows == 1 else self._rough
        return super().forward(tokens, cache, block, aux_layers)


def plain_answer(target, seed):
    """To the prompt of that seed; computed once."""
    if seed not in target.plain:
        target.plain[seed] = decoding.answer(target, NoDraft(), prompt_of(seed), LOOSE)
    return target.plain[seed]


def drafted_answer(target, seed, config):
    """With trees around the plain answer; its tokens, and what it took."""
    prompt = prompt_of(seed)
    drafter = foretold(prompt, plain_answer(target, seed), seed)
    return counted(target, drafter, decoding.start(target, drafter, prompt), config)


def counted(target, drafter, state, config):
    """The tokens of an answer, and its statistics."""
    deltas = list(decoding.decode(target, drafter, state, config))
    return decoding.tokens_in(delta.accepted for delta in deltas), deltas[-1].statistics
