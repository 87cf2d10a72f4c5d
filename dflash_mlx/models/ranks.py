"""One target on several ranks: whether it can be, whether all have the same, and its loading."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import in_one_line
from dflash_mlx.models.check import ModelFacts, fetched
from dflash_mlx.models.names import target_names
from dflash_mlx.models.source import CONFIG
from dflash_mlx.models.targets import read_target, target_facts
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.system.machine import describe_versions
from dflash_mlx.system.ranks import BAD_INPUT, Ranks
from dflash_mlx.target.model import Target
from dflash_mlx.target.ranks import Follower, Leader, Orders

_HEADS = (
    "num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads",
)  # fmt: skip
_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_PACKAGES = ("dflash-chat", "mlx", "mlx-lm")  # whose versions have to be the same
_SAMPLE = 2**20  # bytes at either end of a weight file that are compared
_SPLIT = nn.AllToShardedLinear, nn.QuantizedAllToShardedLinear
_ONE_MACHINE = "run it on one machine, or choose another model"


def check_ranks(facts: ModelFacts, size: int) -> None:
    """DFlashError for a target that so many ranks cannot share; no weight is read."""
    from mlx_lm.utils import _get_classes  # takes seconds

    config, name = _config_of(facts), facts.name
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


def _config_of(facts: ModelFacts) -> Mapping[str, Any]:
    """The configuration of a target, that of the embedded one from its file."""
    if facts.source is not None:
        return facts.config  # type: ignore[no-any-return]
    from dflash_mlx.models.formats.gguf_target import read_config  # takes seconds

    return read_config(_file_of(facts))


def _file_of(facts: ModelFacts) -> Path:
    from dflash_mlx.models.default_model import fetch

    return facts.file or fetch()


def _group_of(facts: ModelFacts) -> int:
    """Neighbouring weights that have to stay together."""
    if facts.source is None:
        from dflash_mlx.models.formats.gguf_target import GROUP  # takes seconds

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


def fingerprint(facts: ModelFacts, ranks: Ranks) -> dict[str, Any]:
    """What has to be the same on all ranks; of weight files the size and what is at their ends."""
    same = _start(ranks)
    if facts.source is None:
        files = [_file_of(facts)]
    else:
        folder = facts.source.here
        files = [folder / CONFIG, *sorted(folder.glob(facts.source.weights))]
    return same | {file.name: _digest(file) for file in files}


def _start(ranks: Ranks) -> dict[str, Any]:
    """Versions, and the words that this rank was started with."""
    versions = describe_versions()
    same: dict[str, Any] = {package: versions.get(package) for package in _PACKAGES}
    return same | {"words of the command line": ranks.words}


def check_same(ranks: Ranks) -> None:
    """End all ranks where one was started otherwise, or has other files under its words' names."""
    named = {word: Path(word) for word in ranks.words}
    files = {word: _digest(file) for word, file in named.items() if file.is_file()}
    own = _start(ranks) | files
    if ranks.rank:
        ranks.tell(own)
        ranks.hear()
        return
    for rank in ranks.followers:
        its = ranks.hear(rank)
        _compare(ranks, rank, own, {key: its.get(key, own[key]) for key in own})
    ranks.tell({})


def _compare(ranks: Ranks, rank: int, own: Mapping[str, Any], its: Mapping[str, Any]) -> None:
    for key in [*own, *its]:
        if own.get(key) != its.get(key):
            differs = f"{key} is {its.get(key)} there and {own.get(key)} on rank 0"
            ranks.fault(f"rank {rank} of {ranks.size} differs: {differs}", BAD_INPUT)


def _digest(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as opened:
        digest = hashlib.sha256(opened.read(_SAMPLE))
        opened.seek(max(0, size - _SAMPLE))
        digest.update(opened.read(_SAMPLE))
    return f"{size} bytes, {digest.hexdigest()[:16]}"


def lead(ranks: Ranks, config: PairConfig, facts: ModelFacts) -> tuple[Target, Any]:
    """The first rank's part of a target, and its tokenizer; the others load theirs.

    facts: fetched. Ends all ranks where one has something else.
    """
    ranks.tell({"load": asdict(config)})
    own = fingerprint(facts, ranks)
    for rank in ranks.followers:
        _compare(ranks, rank, own, ranks.hear(rank))
    ranks.tell({})
    return _read_part(ranks, facts, partial(Leader, orders=Orders(ranks.tell, ranks.fault)))


def follow(ranks: Ranks) -> NoReturn:
    """Load a part of what the first rank loads, and do what it does until it ends."""
    try:
        told = ranks.hear()["load"]
        config = PairConfig(**told | {"template": tuple(told["template"])})
        facts = target_facts(target_names(config.model))
        facts.raise_first()
        facts = fetched(facts)
        ranks.tell(fingerprint(facts, ranks))
        ranks.hear()
        target, _ = _read_part(ranks, facts, Target)
        target.kv_bits = config.kv_bits
        Follower(target).replay(ranks.hear)
    except Exception as error:
        ranks.failed(error, BAD_INPUT if isinstance(error, DFlashError) else 1)
    raise AssertionError  # neither of them returns


def _read_part(ranks: Ranks, facts: ModelFacts, make: Any) -> tuple[Target, Any]:
    """This rank's part of a target; one pass on all ranks shows whether it computes at all."""

    def share(model: nn.Module) -> None:
        try:
            model.shard(ranks.group)
        except (ValueError, AssertionError) as error:
            what = f"{facts.name} cannot be split over {ranks.size} ranks ({in_one_line(error)})"
            raise DFlashError(what, _ONE_MACHINE) from None
        for name, module in model.named_modules():
            if name.endswith("lm_head") and isinstance(module, _SPLIT):  # drafters need it whole
                what = f"{facts.name} is a {type(model).__module__.rpartition('.')[2]}, whose head"
                raise DFlashError(f"{what} mlx-lm splits, too", _ONE_MACHINE)

    target, tokenizer = read_target(facts, share, make)
    mx.eval(target.model(mx.array([[0]])))
    return target, tokenizer
