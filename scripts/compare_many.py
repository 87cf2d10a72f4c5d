"""Requests at once against one after the other, and against mlx-lm's batched generation.

    .venv/bin/python scripts/compare_many.py --prompts PROMPTS.jsonl

Tokens per second of 1, 2, 4 and 8 greedy answers, all together and (in brackets) of the median
answer from the moment it was asked for, with and without drafts, each the median of several runs
that take turns; and how long three answers pause while a long prompt is read. Let nothing else run
meanwhile.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from statistics import median

from dflash_mlx.cli import options as cli  # isort: skip  # loads the BLAS before MLX

import mlx.core as mx

from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load_pair
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.templates import prompt_tokens

PROGRAM = "compare_many.py"

Prompts = list[list[int]]
Ends = list[tuple[int, float]]  # tokens of each answer, and the seconds until it had ended


def together(pair: Pair, prompts: Prompts, method: str, tokens: int) -> Ends:
    """What came of all answers at once, their prompts included."""
    scheduler, begin = Scheduler(pair), time.perf_counter()
    config = DecodeConfig(method, max_tokens=tokens)
    ends = {scheduler.submit(prompt, config): (0, 0.0) for prompt in prompts}
    while scheduler:
        for answering, delta in scheduler.step():
            if isinstance(delta, Exception):
                raise delta
            said = ends[answering][0] + len(delta.tokens)
            ends[answering] = said, time.perf_counter() - begin
    return [*ends.values()]


def in_turn(pair: Pair, prompts: Prompts, method: str, tokens: int) -> Ends:
    """When each answer ends if they come one after the other; all are asked for at once."""
    ends, begin = [], 0.0
    for prompt in prompts:
        ((said, seconds),) = together(pair, [prompt], method, tokens)
        begin += seconds
        ends.append((said, begin))
    return ends


def batched(pair: Pair, prompts: Prompts, method: str, tokens: int) -> Ends:
    """The same by mlx-lm's generator, which has no drafts."""
    from mlx_lm.generate import BatchGenerator

    stops = [[token] for token in pair.tokenizer.eos_token_ids]
    generator = BatchGenerator(pair.target.model, max_tokens=tokens, stop_tokens=stops)
    begin = time.perf_counter()
    ends = {uid: (0, 0.0) for uid in generator.insert(prompts)}
    left = len(prompts)
    while left:
        for response in generator.next_generated():
            ends[response.uid] = ends[response.uid][0] + 1, time.perf_counter() - begin
            left -= response.finish_reason is not None
    return [*ends.values()]


def pauses(pair: Pair, prompts: Prompts, tokens: int, chunked: bool) -> tuple[float, float]:
    """Three answers while a prompt of about `tokens` is read: their longest pause, their median.

    Seconds between two rounds of an answer; the median is of those before the prompt came. chunked:
    whether steps are kept short; else the prompt is read by passes of the usual size.
    """
    tokenizer = copy(pair.tokenizer)
    tokenizer.eos_token_ids = ()  # so that no answer ends meanwhile
    scheduler = Scheduler(replace(pair, tokenizer=tokenizer))
    config = DecodeConfig("auto", max_tokens=2000)
    for prompt in prompts[:3]:
        scheduler.submit(prompt, config)
    long = [token for prompt in prompts for token in prompt] * (1 + tokens // 1000)
    before, during = [], []
    for _ in range(24):  # the prompts of the three among them
        before.append(_seconds(scheduler))
    late = scheduler.submit(long[:tokens], replace(config, max_tokens=2))
    scheduler.fair = chunked
    while late.is_unread:
        during.append(_seconds(scheduler))
    return max(during), median(before[8:])


def _seconds(scheduler: Scheduler) -> float:
    begin = time.perf_counter()
    scheduler.step()
    return time.perf_counter() - begin


WAYS: dict[str, tuple[Callable[..., Ends], str]] = {
    "in turn, plain": (in_turn, "none"),
    "in turn, drafts": (in_turn, "auto"),
    "together, plain": (together, "none"),
    "together, drafts": (together, "auto"),
    "mlx-lm batch": (batched, "none"),
}


def main(argv: Sequence[str]) -> None:
    """Print a table."""
    asked = parser().parse_args(argv)
    texts = read_prompts(asked.prompts)
    if max(asked.counts) > len(texts):
        what = f"{asked.prompts} has only {len(texts)} prompts"
        raise DFlashError(what, "ask for so many at most", "counts")
    pair = load_pair(PairConfig(), DecodeConfig())
    rng = random.Random(0)
    rng.shuffle(texts)
    prompts = [prompt_tokens(pair.tokenizer, text["messages"], None) for text in texts]
    found: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for run in range(asked.runs + 1):  # the first warms up, and measures passes
        cases = [(way, n) for way in WAYS for n in asked.counts]
        rng.shuffle(cases)
        for way, n in cases:
            call, method = WAYS[way]
            begin = (run * n) % (len(prompts) - n + 1)
            ends = call(pair, prompts[begin : begin + n], method, asked.max_tokens)
            mx.clear_cache()
            if run:
                total = sum(said for said, _ in ends) / max(seconds for _, seconds in ends)
                found[way, n].append((total, median(said / seconds for said, seconds in ends)))
    print("tokens per second".ljust(20), *(f"{n:>14}" for n in asked.counts))
    for way in WAYS:
        rates = [map(median, zip(*found[way, n], strict=True)) for n in asked.counts]
        print(way.ljust(20), *("{:6.1f} ({:5.1f})".format(*rate) for rate in rates))
    for chunked in (False, True):
        longest, usual = pauses(pair, prompts, asked.long, chunked)
        how = "in chunks" if chunked else "as alone"
        print(
            f"three answers beside a prompt of {asked.long} tokens, read {how}: longest pause "
            f"{longest:.2f} s, {longest / usual:.1f} times the median before"
        )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(prog=PROGRAM, description="Requests at once against one after the other.")
    result.add_argument("--prompts", type=Path, required=True, help="as for dflash_mlx.benchmark")
    result.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8])
    result.add_argument("--max-tokens", type=int, default=64)
    result.add_argument("--runs", type=int, default=5)
    result.add_argument("--long", type=int, default=4000, help="tokens of the long prompt")
    return result


if __name__ == "__main__":
    cli.run(main, PROGRAM)
