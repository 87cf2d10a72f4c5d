"""Prompts with pieces that are no text: prefixes are shared only where the pieces are equal."""

from __future__ import annotations

import mlx.core as mx
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.prompt import Piece, Prompt
from dflash_mlx.engine.delta import collect
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefix_files import PrefixFiles
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.verifier.model import Target
from support.decoding import Strict, finish
from support.families import make_model
from support.toys import Letters, prompt_of

PLACEHOLDER, START, LENGTH = 7, 100, 20
TEXT = prompt_of(0, 300)


def picture(shade: float, digest: str) -> Prompt:
    """A text with a piece in its middle, whose token ids say nothing."""
    tokens = [*TEXT[:START], *[PLACEHOLDER] * LENGTH, *TEXT[START + LENGTH :]]
    width = make_model("llama").args.hidden_size
    piece = Piece(START, LENGTH, digest, lambda: mx.full((LENGTH, width), shade))
    return Prompt(tuple(tokens), (piece,))


BRIGHT, DARK = picture(0.5, "bright"), picture(-0.5, "dark")
WORDS = Prompt(BRIGHT.tokens)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(Target(make_model("llama"), 1000, "llama"), Letters())


def ask(scheduler: Scheduler, *prompts: Prompt) -> list[tuple[tuple[int, ...], int]]:
    """The tokens of each answer, and how much of its prompt was there already."""
    config = DecodeConfig("none", max_tokens=8, prefill_step=64)
    asked = [scheduler.submit(prompt, config) for prompt in prompts]
    said = finish(scheduler)
    return [(collect(iter(said[a])).tokens, a.statistics.reused_tokens) for a in asked]


def said_of(scheduler: Scheduler, sequence: Sequence) -> tuple[int, ...]:
    """The tokens that a sequence brings from now on."""
    return collect(iter(finish(scheduler)[sequence])).tokens


def alone(pair: Pair, prompt: Prompt) -> tuple[int, ...]:
    return ask(Scheduler(pair), prompt)[0][0]


def test_a_piece_has_its_part_in_the_answer_and_keys_tell_it_from_others(pair):
    assert len({alone(pair, prompt) for prompt in (BRIGHT, DARK, WORDS)}) == 3
    keys = [[prompt.key_at(i) for i in range(len(prompt))] for prompt in (BRIGHT, DARK, WORDS)]
    assert all(list(p.keys) == k for p, k in zip((BRIGHT, DARK, WORDS), keys, strict=True))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        differ = [i for i in range(300) if keys[one][i] != keys[other][i]]
        assert differ == list(range(START, START + LENGTH))


@pytest.mark.parametrize("kept", ["in memory", "on disk", "running"])
def test_prompts_with_other_pieces_never_share_a_prefix(pair, tmp_path, kept):
    expected = [alone(pair, prompt) for prompt in (BRIGHT, DARK, WORDS, BRIGHT)]
    files = PrefixFiles(tmp_path, 10**9, worth=4) if kept == "on disk" else None
    prefixes = PrefixCache(10**9, files)
    scheduler = Scheduler(pair, observer=Strict(), prefixes=prefixes)
    if kept == "running":
        told = ask(scheduler, BRIGHT, DARK, WORDS, BRIGHT)
    else:
        told = []
        for prompt in (BRIGHT, DARK, WORDS, BRIGHT):
            told += ask(scheduler, prompt)
            if kept == "on disk":  # as after a restart
                prefixes.save()
                prefixes = scheduler.prefixes = PrefixCache(
                    10**9, PrefixFiles(tmp_path, 10**9, worth=4)
                )
    assert [tokens for tokens, _ in told] == expected
    first, *others, again = [reused for _, reused in told]
    assert first == 0 and all(reused <= START for reused in others), "nothing of the other piece"
    assert again > START + LENGTH, "the same piece is read once"


def test_a_preempted_answer_reads_its_piece_again(pair):
    scheduler = Scheduler(pair, observer=Strict())
    config = DecodeConfig("none", max_tokens=12)
    sequence, said = scheduler.submit(BRIGHT, config), []
    scheduler.submit(DARK, config)
    while sequence.statistics.generated_tokens < 4:
        said += [delta.tokens for each, delta in scheduler.step() if each is sequence]
    scheduler.running.remove(sequence)
    sequence.preempt()
    scheduler.waiting.append(sequence)
    plain = Scheduler(pair)
    whole = said_of(plain, plain.submit(BRIGHT, config))
    assert sum(said, ()) + said_of(scheduler, sequence) == whole


def test_a_draft_model_reads_on_behind_a_piece(pair):
    drafted = ask(Scheduler(pair), BRIGHT)
    config = DecodeConfig("ngram", max_tokens=8, block_size=4)
    scheduler = Scheduler(pair)
    assert said_of(scheduler, scheduler.submit(BRIGHT, config)) == drafted[0][0]
