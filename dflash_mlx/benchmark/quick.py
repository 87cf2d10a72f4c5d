"""A dozen prompts with the draft models of every family, and a race on one question."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from dflash_mlx.benchmark.measure import MethodStats, Run, run_all, summarise
from dflash_mlx.benchmark.report import Report
from dflash_mlx.benchmark.selection import questions, read_methods, settle_all
from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.core.config import PLAIN, DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import draws_drafts, find_method, settle
from dflash_mlx.engine.delta import Delta
from dflash_mlx.engine.exact import Difference, first_difference
from dflash_mlx.engine.pair import Capabilities, Pair, Speeds
from dflash_mlx.models.check import check_drafter
from dflash_mlx.models.names import SHIPPED, find_source
from dflash_mlx.models.source import DRAFTER
from dflash_mlx.session.session import Question, Session
from dflash_mlx.session.templates import prompt_tokens
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.system.machine import free_memory

PROMPTS = SHIPPED / "prompts.jsonl"
TOKENS = 48  # of each answer
PAYS = 1.05  # times plain decoding, below which nobody would notice
RACE_SIDES = "plain", "drafted"
SLICE = 1.0  # seconds that one side of a race runs before the other may
COMPARED = 20  # tokens of each side of a race, for its speeds to be compared


def bench(pair: Pair, methods: Sequence[str]) -> Generator[None, None, Report]:
    """Answer the dozen prompts with plain decoding and with `methods`, which take turns.

    Yields after each pass, so that others can have the machine in between. Raises DFlashError for
    a method that the pair does not serve.
    """
    named = read_methods(",".join(methods), DecodeConfig(max_tokens=TOKENS))
    settled = settle_all(named, pair.capabilities)
    asked = questions(pair.tokenizer, read_prompts(PROMPTS), (), (), pair.template)
    runs = list[Run]()
    for some in run_all(pair, asked, settled):
        runs += some or ()
        yield
    return summarise(runs)


def comparing(pair: Pair, again: bool = False) -> Generator[str | None, None, None]:
    """`bench` with the draft models of every family on the disk, once, or again; then they go.

    Last comes a sentence on what will draft. Nothing where they do not all fit here.
    """
    if pair.speeds is None or (pair.speeds.found and not again):
        return
    if (whole := (yield from _with_all(pair, pair.speeds))) is None:
        return
    methods = [_usual(whole, family) for family, _ in pair.speeds.drafters]
    report = yield from bench(whole, methods)
    yield pair.speeds.keep([report["methods"][method]["speedup"] for method in methods])


def _usual(pair: Pair, family: str) -> str:
    """The method that `auto` is with the draft models of one family alone."""
    families = tuple(model.family for model in pair.drafters if model.family == family)
    alone = Capabilities(families, pair.target.takes_trees, pair.preset)
    return settle(DecodeConfig(), alone).method


def _with_all(pair: Pair, speeds: Speeds) -> Generator[None, None, Pair | None]:
    """The pair without experience, with all these draft models, loaded one at a step.

    None where one does not fit it, or would take more than half of the memory that is left.
    """
    models = list(pair.drafters)
    try:
        for family, name in speeds.drafters:
            if pair.capabilities.count(family):
                continue
            drafter = check_drafter(find_source(name, DRAFTER, update=False))
            fits = drafter.weights.memory(on_cpu()) <= free_memory() // 2
            if not (found := pair.further(family) if fits else []):
                return None
            models += found
            yield
    except DFlashError:
        return None
    return replace(pair, drafters=tuple(models), learned={})


def what_pays(report: Report, capabilities: Capabilities) -> str:
    """One sentence on the fastest method. capabilities: of the pair, for its name."""
    methods: dict[str, MethodStats] = report["methods"]
    best: str = max(methods, key=lambda name: methods[name]["speedup"])
    figures, plain = methods[best], methods[PLAIN]["tokens_per_second"]
    if best == PLAIN or figures["speedup"] < PAYS:
        return (
            f"Drafts do not pay on this machine: no method was more than {PAYS:.2f} times as fast "
            f"as plain decoding, which writes {plain:.1f} tokens a second"
        )
    label = find_method(best.partition(":")[0]).called(capabilities)
    by_kind: dict[str, dict[str, MethodStats]] = report["categories"]
    kinds = {kind: float(found[best]["speedup"]) for kind, found in by_kind.items()}
    most, least = (pick(kinds, key=lambda kind: kinds[kind]) for pick in (max, min))
    return (
        f"{label} pays on this machine: on the median prompt {figures['speedup']:.2f} times "
        f"as fast as plain decoding (median speeds: {figures['tokens_per_second']:.1f} and "
        f"{plain:.1f} tokens a second), most for {most} ({kinds[most]:.2f}), least for {least} "
        f"({kinds[least]:.2f})"
    )


@dataclass(frozen=True)
class RaceStep:
    """One side of a race moved on."""

    side: str
    text: str  # what came new
    tokens: int
    seconds: float  # its own decoding time so far
    finished: bool


@dataclass(frozen=True)
class RaceResult:
    """How a race ended."""

    text: str  # a sentence
    equal: bool  # whether every token is the same
    ratio: float = 0.0  # times as fast as plain decoding; 0 where that says nothing


def race(pair: Pair, request: Question) -> Iterator[RaceStep | RaceResult]:
    """Both sides in turn, always the one that has had less time, from the same seed."""
    if request.config.method == PLAIN:
        what = "the method is none, so both sides would decode plainly"
        raise DFlashError(what, "choose another --method")
    sampling = request.config.sampling.with_seed()
    config = settle(replace(request.config, sampling=sampling), pair.capabilities)
    if draws_drafts(config):
        what = "answers drawn by rejection differ from plain ones, by design"
        raise DFlashError(what, "leave out --acceptance to compare them token by token")
    tokens = prompt_tokens(pair.tokenizer, request.opened, request.system, template=pair.template)
    plain = Lane("plain", Session(pair, replace(config, method=PLAIN)).stream(tokens))
    drafted = Lane("drafted", Session(pair, config).stream(tokens))
    while running := [lane for lane in (drafted, plain) if not lane.finished]:
        yield from min(running, key=lambda lane: lane.seconds).run(SLICE)
    difference = first_difference(pair.target, tokens, plain.tokens, drafted.tokens)
    yield result_of(plain, drafted, difference)


@dataclass
class Lane:
    """One side of a race."""

    side: str
    deltas: Iterator[Delta]
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0  # of decoding, the device's unfinished work included
    finished: bool = False

    def run(self, seconds: float) -> Iterator[RaceStep]:
        """Decode for so long, then wait for the device, lest it work in the other's time."""
        end = self.seconds + seconds
        while self.seconds < end and not self.finished:
            begin = time.perf_counter()
            delta = next(self.deltas)
            first = not self.tokens
            self.tokens.extend(delta.tokens)
            self.finished = delta.finish_reason is not None
            self.seconds += time.perf_counter() - begin
            if first:
                self.seconds -= delta.statistics.prefill_seconds
            yield RaceStep(self.side, delta.text, len(self.tokens), self.seconds, self.finished)
        begin = time.perf_counter()
        mx.synchronize()
        self.seconds += time.perf_counter() - begin


def result_of(plain: Lane, drafted: Lane, difference: Difference | None) -> RaceResult:
    """Who was faster, and whether both said the same, token by token."""
    ratio, speed = _compared(plain, drafted)
    if difference is None:
        return RaceResult(f"All {len(plain.tokens)} tokens are the same. {speed}.", True, ratio)
    if difference.margin is None:
        why = "one answer ends there"
    elif difference.is_near_tie:
        apart = f"logits {difference.margin:.1e} apart"
        why = f"where two tokens are nearly tied ({apart}), and rounding picks either"
    else:
        why = f"with logits {difference.margin:.2f} apart, which is not a tie: please report it"
    return RaceResult(f"The same up to token {difference.position}, {why}. {speed}.", False, ratio)


def _compared(plain: Lane, drafted: Lane) -> tuple[float, str]:
    """The ratio of both speeds, 0 where it says nothing, and a sentence."""
    if min(len(plain.tokens), len(drafted.tokens)) < COMPARED:
        return 0.0, f"Fewer than {COMPARED} tokens do not tell which is faster"
    ratio = plain.seconds / drafted.seconds * len(drafted.tokens) / len(plain.tokens)
    if 2 - PAYS < ratio < PAYS:
        return 0.0, "With drafts it is as fast as plain decoding on this question"
    return ratio, f"{ratio:.2f} times as fast as plain decoding on this question"
