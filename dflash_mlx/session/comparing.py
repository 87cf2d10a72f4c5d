"""Which of the drafters on the disk is fastest with a target, found out while nothing is asked."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import replace
from statistics import median

from dflash_mlx.core.config import PLAIN, DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.check import check_drafter
from dflash_mlx.models.names import SHIPPED, find_source
from dflash_mlx.models.source import DRAFTER
from dflash_mlx.session.session import Session
from dflash_mlx.session.templates import prompt_tokens
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.system.machine import free_memory

TOKENS = 48  # of each answer


def comparing(pair: Pair, again: bool = False) -> Generator[str, None, None]:
    """Answer a dozen prompts plainly and with the drafters of each family in turn, once, or again.

    Greedy answers are the same with all. Each begins without experience, and with an answer that
    does not count. What counts is the median of decoding speeds over plain ones, prompt by prompt,
    as in the benchmark. Yields "" after every step, so that others can have the machine in between,
    and last what the next start drafts with.
    """
    speeds, config = pair.speeds, DecodeConfig(max_tokens=TOKENS)
    if speeds is None or (speeds.found and not again):
        return
    families = {name: family or pair.drafters[0].family for family, name in speeds.drafters}
    sessions = {PLAIN: Session(pair, replace(config, method=PLAIN))}
    for name, family in families.items():
        if (its := _with(pair, family, name)) is not None:
            sessions[name] = Session(its, config)
        yield ""
    lines = (SHIPPED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    ratios: dict[str, list[float]] = {name: [] for name in families}
    order = list(sessions)
    for turn, text in enumerate([texts[0], *texts]):
        tokens = prompt_tokens(pair.tokenizer, text, template=pair.template)
        order, rates = [*order[1:], order[0]], dict[str, float]()
        for name in order:
            for delta in sessions[name].stream(tokens):
                rates[name] = delta.statistics.tokens_per_second
                yield ""
        plain = rates.pop(PLAIN)
        for name, rate in rates.items():
            if turn and plain:  # 0 for an answer that ended with its first token
                ratios[name].append(rate / plain)
    times = {name: median(found or [0.0]) for name, found in ratios.items()}
    yield speeds.keep(families, times)


def _with(pair: Pair, family: str, name: str) -> Pair | None:
    """The pair with its drafters of one family alone; None where those cannot be had here."""
    models = [model for model in pair.drafters if model.family == family]
    try:
        if not models:
            drafter = check_drafter(find_source(name, DRAFTER, update=False))
            if drafter.weights.memory(on_cpu()) > free_memory():
                return None
            models = pair.further(family)
    except DFlashError:
        return None
    if not models:
        return None
    return replace(pair, drafters=tuple(models), drafter_name=name, learned={})
