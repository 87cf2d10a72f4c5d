"""A command on several ranks, as `mlx.launch` starts them: one target that is split over them."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError, in_one_line
from dflash_mlx.models import default_model
from dflash_mlx.models.check import ModelFacts, fetched
from dflash_mlx.models.names import target_names
from dflash_mlx.models.read import TargetReader, read_target, target_facts
from dflash_mlx.models.source import CONFIG
from dflash_mlx.ranks import RankMode, check_alone, end_if_lost
from dflash_mlx.ranks.group import END, PROBLEM, Ranks, RanksDiffer, join
from dflash_mlx.ranks.target import Follower, Leader
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.system.machine import describe_versions
from dflash_mlx.verifier.model import Target

_PACKAGES = ("dflash-chat", "mlx", "mlx-lm")  # whose versions have to be the same
_HEADS = (
    "num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads",
)  # fmt: skip
_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_SAMPLE = 2**20  # bytes at either end of a weight file that are compared
_ONE_MACHINE = "run it on one machine, or choose another model"


def take_part(
    main: Callable[..., None], program: str, mode: RankMode
) -> Callable[[Sequence[str]], None]:
    """`main` as one of several ranks does it, given also what reads a split target."""

    def work(argv: Sequence[str]) -> None:
        ranks = join()
        if ranks.rank:
            _be_silent()
        if mode is RankMode.ALONE:
            check_alone(program)
        try:
            versions = describe_versions()
            ranks.check_alike({package: versions.get(package) for package in _PACKAGES})
            if ranks.rank:
                follow(ranks)
            else:
                main(argv, SplitTarget(ranks))
                ranks.end()
        except RanksDiffer:
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                end_if_lost(error)
            _tell_failure(ranks, error)
            raise

    return work


def _be_silent() -> None:
    """The first rank speaks for all, and ends the others when it is interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good


def _tell_failure(ranks: Ranks, error: BaseException) -> None:
    """Let the others know: by an order where they wait for one, by a sentence where they do not."""
    if not ranks.rank:
        ranks.end()
    elif isinstance(error, Exception):
        what = f"rank {ranks.rank} of {ranks.size} failed: {in_one_line(error)}"
        print(what, file=sys.__stderr__, flush=True)


def check_ranks(facts: ModelFacts, size: int) -> None:
    """DFlashError for a target that so many ranks cannot share; no weight is read."""
    from mlx_lm.utils import _get_classes  # takes seconds

    config, name = facts.config, facts.name
    raw = config if facts.source is None else facts.source.read_json(CONFIG)
    model, _ = _get_classes(dict(raw))
    if not hasattr(model, "shard"):
        what = f"{name} is a {raw['model_type']}, which mlx-lm does not split over several ranks"
        raise DFlashError(what, _ONE_MACHINE)
    units = dict(_units(config, 1 if on_cpu() else _group_of(facts)))
    uneven = [f"{key} {value}" for key, (value, unit) in units.items() if value % (size * unit)]
    if not uneven:
        return
    most = min(value // unit for value, unit in units.values())
    fits = (n for n in range(2, most + 1) if not any(v % (n * u) for v, u in units.values()))
    would_do = [str(n) for n in fits]
    step = f"start {' or '.join(would_do)} ranks" if would_do else _ONE_MACHINE
    what = f"{name} cannot be split over {size} ranks, which do not divide its"
    raise DFlashError(f"{what} {' and '.join(uneven)}", step)


def _group_of(facts: ModelFacts) -> int:
    """Neighbouring weights that have to stay together."""
    if facts.source is None:
        from dflash_mlx.models.gguf_target import GROUP  # takes seconds

        return GROUP
    return facts.weights.group_size if facts.weights.quantisation else 1


def _units(config: Mapping[str, Any], group: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """What is split: its name, how many there are, and how many have to stay together."""
    one_for_all = "kv_lora_rank" in config  # keys and values of such models are not split
    for key in _HEADS:
        value = config.get(key)
        if isinstance(value, int) and not (one_for_all and key == "num_key_value_heads"):
            yield key, (value, 1)
    for key in _INNER:
        values = config.get(key)
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, int) and value:
                yield key, (value, group)
    heads = config.get("num_attention_heads")
    width = config.get("v_head_dim") or config.get("head_dim")
    if group > 1 and isinstance(heads, int) and (width or "hidden_size" in config):
        yield "attention width", (heads * (width or config["hidden_size"] // heads), group)


def fingerprint(facts: ModelFacts) -> dict[str, Any]:
    """What tells models apart; of weight files the size and what is at their ends."""
    if facts.source is None:
        files = [facts.file or default_model.fetch()]
    else:
        folder = facts.source.here
        files = [folder / CONFIG, *sorted(folder.glob(facts.source.weights))]
    return {file.name: _digest(file) for file in files}


def _digest(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as opened:
        digest = hashlib.sha256(opened.read(_SAMPLE))
        opened.seek(max(0, size - _SAMPLE))
        digest.update(opened.read(_SAMPLE))
    return f"{size} bytes, {digest.hexdigest()[:16]}"


class SplitTarget(TargetReader):
    """The first rank's part of a target; the others load theirs when it does."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self.parts = ranks, ranks.size

    def check(self, facts: ModelFacts) -> None:
        check_ranks(facts, self.parts)

    def read(self, facts: ModelFacts, config: PairConfig) -> tuple[Target, Any]:
        self._ranks.share([["load", config.model, config.kv_bits]])
        self._ranks.check_alike(fingerprint(facts))
        return _read_part(self._ranks, facts, partial(Leader, ranks=self._ranks))


def follow(ranks: Ranks) -> None:
    """Load a part of what the first rank loads, and do what it does until it ends."""
    ((order, *told),) = ranks.share()
    if order == END:
        return
    model, kv_bits = told
    try:
        facts = target_facts(target_names(model))
        facts.raise_first()
        facts = fetched(facts)
        own = fingerprint(facts)
    except DFlashError as error:
        own = {PROBLEM: [error.what, error.next_step]}
    ranks.check_alike(own)
    target, _ = _read_part(ranks, facts, Target)
    target.kv_bits = kv_bits
    Follower(target, ranks).replay()


def _read_part(ranks: Ranks, facts: ModelFacts, make: Any) -> tuple[Target, Any]:
    """This rank's part of a target; one pass on all ranks shows whether it computes at all."""
    share = partial(split, group=ranks.group, name=facts.name)
    target, tokenizer = ranks.agree(lambda: read_target(facts, share, make))
    mx.eval(target.model(mx.array([[0]])))
    return target, tokenizer


def split(model: Any, group: Any, name: str) -> None:
    """Leave of a model the part that this rank computes. DFlashError where mlx-lm cannot."""
    modules: list[Any] = [module for _, module in model.named_modules()]
    heads = [(module, module.lm_head) for module in modules if "lm_head" in module]
    try:
        model.shard(group)
    except (ValueError, AssertionError) as error:
        what = f"{name} cannot be split over {group.size()} ranks ({in_one_line(error)})"
        raise DFlashError(what, _ONE_MACHINE) from None
    for module, head in heads:  # which some families split, too, and draft models need whole
        if module.lm_head is not head:
            module.lm_head, module.sharding_group = head, None
