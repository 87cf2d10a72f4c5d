"""What each prompt is asked to become: its share of greedy answers, its seed, its limits."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from dflash_mlx.core.config import CorpusConfig
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.templates import Message
from dflash_mlx.train.corpus.batch import Job
from dflash_mlx.train.corpus.rows import CorpusHeader, tokenizer_fingerprint

_ONLY_HOW_MANY = ("batch_size", "limit", "self_prompt")  # rows, not which


@dataclass(frozen=True)
class Prompt:
    """A prompt waiting for its answer; messages: where the model wrote it itself."""

    id: str
    category: str
    tokens: tuple[int, ...]
    messages: tuple[Message, ...] = ()


def lot(seed: int, name: str) -> tuple[float, int]:
    """A number from 0 to 1 and a 32-bit seed, the same for the same arguments everywhere."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    chance = int.from_bytes(digest[:8], "big") / 2**64
    return chance, int.from_bytes(digest[8:12], "big")


def answer_job(asked: Prompt, pair: Pair, config: CorpusConfig) -> Job:
    """Answer `asked`, greedily or not, as its id and the seed decide."""
    chance, seed = lot(config.seed, asked.id)
    greedy = chance < config.greedy_share
    room = pair.target.context_length - len(asked.tokens)
    return Job(
        key=asked,
        prompt=asked.tokens,
        stops=frozenset(pair.tokenizer.eos_token_ids),
        max_tokens=min(config.max_tokens, room),
        temperature=0.0 if greedy else config.temperature,
        top_p=1.0 if greedy else config.top_p,
        seed=seed,
    )


def make_header(pair: Pair, config: CorpusConfig) -> CorpusHeader:
    """The header of what this pair's target answers with these settings."""
    settings = asdict(config)
    for name in _ONLY_HOW_MANY:
        del settings[name]
    settings["opening"] = list(config.opening)  # as JSON gives it back
    settings["source"] = "prompts" if config.self_prompt is None else "self"
    vocab_size = int(pair.target.embedding().weight.shape[0])
    return CorpusHeader(
        pair.target.name, vocab_size, tokenizer_fingerprint(pair.tokenizer), settings
    )
