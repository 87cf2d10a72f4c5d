"""Conversations about pictures: what is read again, what never is another's, by which law."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm, the extra vision, is not installed")

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.engine.delta import collect
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefix_files import PrefixFiles
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.vision.prompts import read_prompt
from dflash_mlx.vision.target import SeeingTarget
from support.decoding import Strict, finish, run, start
from support.law import chi_square
from support.schedules import problems, schedule_of
from support.seeing import (
    Characters,
    Processor,
    Reference,
    ask,
    conversation,
    make_target,
    make_whole,
    message,
    picture,
    seeing_pair,
    some_prompt,
)
from support.seeing_families import FAMILIES
from support.toys import Scripted, random_tree

pytestmark = pytest.mark.usefixtures("interpreted")
WORDS_ALONE = SamplingConfig(logit_bias=tuple((token, -100.0) for token in range(6)))
PLAIN = DecodeConfig("none", max_tokens=8, prefill_step=64, sampling=WORDS_ALONE)


def said(scheduler: Scheduler, prompt: Prompt) -> tuple[tuple[int, ...], int]:
    """An answer, and how much of its prompt was there already."""
    sequence = scheduler.submit(prompt, PLAIN)
    found = collect(iter(finish(scheduler)[sequence]))
    return found.tokens, found.statistics.reused_tokens


def fresh(family: str) -> SeeingTarget:
    """A target that has seen nothing."""
    target = SeeingTarget(make_whole(family), 1000, family)
    target.eyes.processor = Processor(family)
    return target


def test_the_time_of_a_picture_does_not_tell_whether_others_have_shown_it():
    target, messages = fresh("smolvlm"), [message("What is ", picture(1), "?")]
    for user, looked in (("a", 1), ("b", 2), ("a", 2)):
        prompt = read_prompt(target, Characters(), messages, user)
        target.embed(prompt, 0, len(prompt))
        assert target.eyes.looked == looked
    assert prompt == read_prompt(target, Characters(), messages), "prefixes are salted elsewhere"


def test_what_is_kept_of_an_answer_does_not_hold_the_file_of_its_picture():
    target = fresh("smolvlm")
    scheduler = Scheduler(Pair(target, Characters()), observer=Strict())
    scheduler.prefixes = PrefixCache(10**9)
    shown = replace(picture(1))
    file = weakref.ref(shown)
    said(scheduler, ask(target, [message("What is ", shown, "?")]))
    del shown
    gc.collect()
    assert scheduler.prefixes.nbytes and file() is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_about_the_same_picture_reads_nothing_of_it_again(family):
    target = fresh(family)
    scheduler = Scheduler(Pair(target, Characters()), observer=Strict())
    scheduler.prefixes = PrefixCache(10**9)
    first = [message("What is ", picture(1, 3, 3), " here?")]
    prompt = ask(target, first)
    words, _ = said(scheduler, prompt)
    tokenizer = Characters()
    turn = [*first, message(tokenizer.decode(words), role="assistant"), message("And why?")]
    later = ask(target, turn)
    assert later.tokens[: len(prompt)] == prompt.tokens
    _, reused = said(scheduler, later)
    (piece,) = later.pieces
    assert reused >= piece.start + piece.length and reused > len(prompt)
    assert target.eyes.looked == 1
    said(Scheduler(Pair(target, tokenizer)), later)  # from the start, where no prefix is kept
    assert target.eyes.looked == 1, "the tower has seen it"


@pytest.mark.parametrize("kept", ["in memory", "on disk"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma4"])
def test_pictures_of_other_pixels_never_share_a_prefix(family, kept, tmp_path):
    target = make_target(family)
    talks = [ask(target, [message("What? ", picture(seed), " Say.")]) for seed in (1, 2, 1)]
    assert talks[0].tokens == talks[1].tokens
    alone = [said(Scheduler(Pair(target, Characters())), talk)[0] for talk in talks]

    def files() -> PrefixFiles | None:
        return PrefixFiles(tmp_path, 10**9, worth=4) if kept == "on disk" else None

    scheduler = Scheduler(Pair(target, Characters()), observer=Strict())
    scheduler.prefixes = PrefixCache(10**9, files())
    begins, again = talks[0].pieces[0].start, len(talks[0]) - 1
    if target.is_recurrent and kept == "on disk":
        again = 0  # a state in a file has no way back into the prompt
    limits = (0, 0), (0, begins), (again, len(talks[0]))
    for talk, expected, (least, most) in zip(talks, alone, limits, strict=True):
        words, reused = said(scheduler, talk)
        assert words == expected and least <= reused <= most
        if kept == "on disk":  # as after a restart
            scheduler.prefixes.save()
            scheduler.prefixes = PrefixCache(10**9, files())


def test_what_the_tower_gave_is_kept_within_a_limit():
    target = fresh("smolvlm")
    pictures = [picture(seed) for seed in range(4)]
    for each in pictures:
        said(Scheduler(Pair(target, Characters())), ask(target, [message("? ", each)]))
    assert target.eyes.looked == 4
    kept = target.eyes.nbytes
    target.eyes._kept = kept // 2
    for each in pictures[::-1]:
        said(Scheduler(Pair(target, Characters())), ask(target, [message("? ", each)]))
    assert target.eyes.nbytes <= kept // 2
    assert 4 < target.eyes.looked <= 8


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4"])
def test_sampled_answers_behind_pictures_follow_the_enumerated_law(family):
    target, talk, length, draws = make_target(family), conversation(3), 3, 300
    prompt, reference = ask(target, talk), Reference(target, talk)

    @lru_cache
    def law(before: tuple[int, ...]) -> dict[int, float]:
        p = np.array(mx.softmax(reference.logits(before).astype(mx.float32)), float)
        top = np.argsort(-p)[:3]
        return dict(zip(top.tolist(), (p[top] / p[top].sum()).tolist(), strict=True))

    likely: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        likely = {
            (*before, token): chance * p
            for before, chance in likely.items()
            for token, p in law(before).items()
        }
    tops = sorted({token for answer in likely for token in answer})
    answers = []
    read = start(target, Scripted(lambda *_: ([], [])), prompt)
    for seed in range(draws):
        rng = np.random.default_rng(seed)

        def script(_: list[int], remaining: int, rng: Any = rng) -> tuple[list[int], list[int]]:
            drafts, parents = random_tree(rng, min(6, remaining - 1), len(tops))
            return [tops[draft] for draft in drafts], parents

        sampling = SamplingConfig(1.0, top_k=3, seed=seed)
        config = DecodeConfig("ddtree", max_tokens=length, sampling=sampling)
        state = read.fork()
        state.opening = read.opening
        answers.append(tuple(run(target, Scripted(script), state, config)))
    assert chi_square(likely, answers) < 4


@pytest.mark.parametrize("seed", range(len(FAMILIES)))
def test_answers_about_pictures_are_those_of_each_alone_whatever_else_is_asked(seed, tmp_path):
    """More of them: `scripts/schedules.py --seeing 200`."""
    family = [*FAMILIES][seed]
    pair = seeing_pair(family, tmp_path)
    found, _ = problems(pair, schedule_of(seed, some_prompt(pair.target), longest=12))
    assert not found


def test_a_template_without_a_place_for_pictures_is_refused():
    class Deaf(Characters):
        def apply_chat_template(self, messages, **options):
            texts = [
                {**m, "content": "".join(p.get("text", "") for p in m["content"])} for m in messages
            ]
            return super().apply_chat_template(texts, **options)

    with pytest.raises(DFlashError, match="qwen3_vl"):
        read_prompt(make_target("qwen3_vl"), Deaf(), [message("? ", picture(1))])
