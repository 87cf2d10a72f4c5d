"""Random lives of an engine: who comes when, asks for what and leaves early, and what each says."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.prompt import Prompt, shared_length
from dflash_mlx.core.sampling import Sampler, tempered
from dflash_mlx.drafters.budget import BatchBudget
from dflash_mlx.drafters.methods import drafting_of, make_drafter
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.models.load import load
from dflash_mlx.models.names import SHIPPED
from dflash_mlx.session.templates import prompt_tokens
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.pass_times import PassTimes
from support.configs import config_with
from support.decoding import Strict, answer, scheduler_of, sequence_of
from support.families import make_model
from support.family_configs import VOCAB_SIZE
from support.pairs import full_pair
from support.toys import foretold, prompt_of

TOYS = ("llama", "llama_sliding", "qwen3_5", "gemma3_text", "gemma2", "lfm2")  # gemma2 takes turns
TIE = 1e-3
_PATIENCE = 2000  # steps

Prompts = Callable[[np.random.Generator], list[int] | Prompt]

METHODS: tuple[dict[str, Any], ...] = (
    {"method": "none"},
    {"method": "ngram"},
    {"method": "ngram", "block_size": 6},
    {"method": "dflash"},
    {"method": "dflash", "block_size": 5},
    {"method": "dflash", "block_size": 5, "acceptance": "reject"},
    {"method": "ddtree"},
    {"method": "ddtree", "budget": 12},
    {"method": "d2sd"},
    {"method": "d2sd", "budget": 12, "branches": 3},
    {"method": "eagle3"},
    {"method": "eagle3", "budget": 9, "branches": 3},
    {"method": "mtp"},
    {"method": "mtp", "budget": 9, "branches": 3},
    {"method": "specdiff"},
    {"method": "specdiff", "block_size": 5},
)


@dataclass(frozen=True)
class Request:
    """One answer that is asked for.

    arrives, leaves: before which step, None for never. knows: whether its drafts are foretold, and
    so often right; tiny drafters know nothing.
    """

    prompt: list[int] | Prompt
    config: DecodeConfig
    arrives: int
    leaves: int | None
    knows: bool


@dataclass(frozen=True)
class Schedule:
    """What happens to an engine. squeezed: in which steps its memory is short, in turn."""

    seed: int
    requests: list[Request]
    squeezed: tuple[bool, ...]


class Watched(Sequence):
    """A sequence that counts how often it was preempted, and keeps what it says."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.said: list[int] = []
        self.drops = 0
        self.left = False

    def preempt(self) -> None:
        self.drops += 1
        super().preempt()


class Ticks:
    """A clock that does not depend on the machine."""

    def __init__(self, seed: int) -> None:
        self._rng, self._now = np.random.default_rng(seed), 0.0

    def __call__(self) -> float:
        self._now += float(self._rng.exponential(0.5))
        return self._now


def toy_pair(name: str, folder: Path) -> Pair:
    """A tiny target of a family, with drafters of all kinds, whose files go to `folder`."""
    target = Target(make_model(name), 1000, name)
    target.pass_times = PassTimes((1, 96), (1.0, 3.0))
    return full_pair(folder, target)


def toy_prompt(rng: np.random.Generator) -> list[int]:
    """Random tokens, some of them again and again; seldom more than the caches begin with."""
    size = int(rng.choice([1, rng.integers(2, 12), rng.integers(12, 60), rng.integers(240, 280)]))
    words = prompt_of(int(rng.integers(2)), int(rng.integers(3, 30)))  # so that some begin alike
    return (words * size)[:size]


def real_pair() -> Pair:
    """The default pair, whose passes are not timed."""
    pair = load()
    pair.target.pass_times = PassTimes((1, 96), (1.0, 3.0))
    return pair


def real_prompts(pair: Pair) -> Prompts:
    """The shipped prompts, through the model's chat template."""
    asked = [row["messages"] for row in read_prompts(SHIPPED / "prompts.jsonl")]
    texts = [prompt_tokens(pair.tokenizer, messages, None) for messages in asked]
    return lambda rng: list(texts[int(rng.integers(len(texts)))])


def schedule_of(seed: int, prompts: Prompts, longest: int = 40) -> Schedule:
    """All that one seed decides. longest: tokens of an answer."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(METHODS), int(rng.integers(1, 4)), replace=False)
    requests, step = [], 0
    for _ in range(int(rng.integers(3, 8))):
        step += int(rng.choice([0, 0, rng.integers(1, 12), rng.integers(10, 40)]))
        options = METHODS[int(rng.choice(chosen))]
        config = _config(rng, options, int(rng.integers(1, longest + 1)))
        leaves = step + int(rng.integers(25)) if rng.random() < 0.25 else None
        knows = rng.random() < 0.3 and "acceptance" not in options
        requests.append(Request(prompts(rng), config, step, leaves, knows))
    short = rng.choice([0.0, 0.1, 0.3])
    squeezed = tuple(bool(share < short) for share in rng.random(int(rng.integers(2, 30))))
    return Schedule(seed, requests, squeezed)


def _config(rng: np.random.Generator, options: dict[str, Any], tokens: int) -> DecodeConfig:
    drawn = options.get("acceptance") == "reject"
    hot = drawn or rng.random() < 0.5
    (other,) = rng.spawn(1)  # so that what it draws changes nothing else
    biased = other.integers(VOCAB_SIZE, size=int(other.choice([0, 0, 3])))
    sampling = SamplingConfig(
        0.7 if hot else 0.0,
        float(rng.choice([1.0, 0.9])) if hot else 1.0,
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.0, 1.3])),
        presence_penalty=float(other.choice([0.0, 0.0, 0.7])),
        frequency_penalty=float(other.choice([0.0, 0.0, -0.3, 0.4])),
        logit_bias=tuple((token, float(other.normal())) for token in biased.tolist()),
        seed=int(rng.integers(2**32)),
    )
    return config_with(
        **options,
        max_tokens=tokens,
        exact=not hot and rng.random() < 0.25,
        prefill_step=int(rng.choice([3, 16, 512])),
        sampling=sampling,
    )


def alone(pair: Pair, request: Request) -> list[int]:
    """What a request is answered with when there is nobody else."""
    drafter = NoDraft() if request.knows else _drafter(replace(pair, learned={}), request.config, 0)
    return answer(pair.target, drafter, request.prompt, request.config)


def run(pair: Pair, schedule: Schedule, answers: abc.Sequence[list[int]]) -> list[Watched]:
    """Let it happen. answers: of each alone, for drafters that know them.

    In half of the schedules, sequences go on from what others have read.
    """
    pair, target = replace(pair, learned={}), pair.target
    drafters: dict[Hashable, Drafter] = {}
    everyone = []
    for i, (request, known) in enumerate(zip(schedule.requests, answers, strict=True)):
        key = drafting_of(request.config)
        if request.knows:
            drafter: Drafter = foretold(request.prompt, known, schedule.seed + i)
        else:
            if key not in drafters:
                drafters[key] = _drafter(pair, request.config, schedule.seed)
            drafter = drafters[key]
        asked = drafter, request.prompt, request.config
        everyone.append(sequence_of(target, *asked, in_company=True, kind=Watched))
    engine = scheduler_of(target, observer=Strict())
    tight = max(
        engine.memory.bytes_of(target, each.drafter, each.state.end + 1) for each in everyone
    )
    if schedule.seed % 4 < 2:
        engine.prefixes = PrefixCache(2 * tight)
    for step, _ in enumerate(_until_done(engine, schedule, everyone)):
        squeezed = schedule.squeezed[step % len(schedule.squeezed)]
        engine.memory.limit = tight if squeezed else 100 * tight
        for each, outcome in engine.step():
            assert not isinstance(outcome, Exception), outcome
            each.said.extend(outcome.accepted.tokens)
    return everyone


def _until_done(engine: Any, schedule: Schedule, everyone: abc.Sequence[Watched]) -> Iterator[None]:
    """Before every step, those who come and go then."""
    last = max(request.arrives for request in schedule.requests)
    for step in range(_PATIENCE):
        for each, request in zip(everyone, schedule.requests, strict=True):
            if step == request.arrives:
                engine.add(each)
            if step == request.leaves and (each in engine.running or each in engine.waiting):
                engine.cancel(each)
                each.left = True
        if step > last and not (engine.running or engine.waiting):
            return
        yield
    raise AssertionError(f"{len(engine.running)} run and {len(engine.waiting)} wait for ever")


def _drafter(pair: Pair, config: DecodeConfig, seed: int) -> Drafter:
    drafter = make_drafter(pair, config)
    if isinstance(drafter, BatchBudget):
        drafter.clock = Ticks(seed)
    return drafter


def problems(pair: Pair, schedule: Schedule) -> tuple[list[str], list[Watched]]:
    """What went otherwise than alone, a line for each request, and what became of all."""
    answers = [alone(pair, request) for request in schedule.requests]
    ended, found = run(pair, schedule, answers), []
    for i, (request, words, each) in enumerate(zip(schedule.requests, answers, ended, strict=True)):
        expected = words[: len(each.said)] if each.left else words
        if each.said != expected and not excused(pair.target, request, expected, each.said):
            asked = f"{request.config}, {each.drops} drops, left: {each.left}"
            found.append(
                f"schedule {schedule.seed}, request {i}: {each.said}, not {expected}; {asked}"
            )
    return found, ended


def excused(
    target: Target, request: Request, expected: abc.Sequence[int], said: abc.Sequence[int]
) -> bool:
    """Whether a near-tie explains where two answers part."""
    at = shared_length(expected, said)
    differ = at < min(len(expected), len(said))
    if not differ or request.config.exact or request.config.acceptance == "reject":
        return False
    return margin(target, request, list(expected[:at]), (expected[at], said[at])) < TIE


def margin(target: Target, request: Request, before: list[int], tokens: tuple[int, int]) -> float:
    """How near the choice between two tokens was, behind `before`.

    Greedy: the difference of their logits. Sampled: the mass between what was drawn and the
    further one, as MLX lays tokens side by side, or by which one of them missed top-p.
    """
    prompt = Prompt.of(request.prompt)
    history = [*prompt.tokens, *before]
    ids, sampling = mx.array(history), request.config.sampling
    whole = Prompt(tuple(history), prompt.pieces)
    embeddings = target.embed(whole, 0, len(history)) if whole.pieces else None
    logits = target.forward(ids, target.new_cache(), Block(len(ids)), (), embeddings)[0][-1]
    sampler = Sampler(sampling, len(request.prompt), sampling.stop_token_ids)
    logits = sampler.adjusted(logits.astype(mx.float32), history)
    if sampling.temperature == 0:
        a, b = (float(logits[token].item()) for token in tokens)
        return abs(a - b)
    law = np.array(mx.softmax(tempered(logits, sampling)))
    if not law[[*tokens]].all():
        return _from_top_p(np.array(mx.softmax(logits)), sampling.top_p, tokens)
    drawn, ends = mx.random.uniform(key=sampler.key(len(history))).item(), np.cumsum(law)
    return max(max(ends[t] - law[t] - drawn, drawn - ends[t]) for t in tokens)


def _from_top_p(law: np.ndarray, top_p: float, tokens: tuple[int, int]) -> float:
    """The least mass by which a token is in the smallest set of that mass, or is not."""
    order = np.argsort(-law)
    below = dict(zip(order.tolist(), (np.cumsum(law[order]) - law[order]).tolist(), strict=True))
    return min(abs(below[token] - top_p) for token in tokens)
