"""From names to a pair: a target with its tokenizer, and a drafter that fits it."""

from __future__ import annotations

from typing import cast

from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.checkpoint import load_network
from dflash_mlx.drafters.dflash.context import limit_windows
from dflash_mlx.drafters.methods import check_uses
from dflash_mlx.engine.pair import Means, Pair
from dflash_mlx.models.drafter_choice import (
    already_packed,
    checked,
    choose,
    downloaded,
    fitting,
)
from dflash_mlx.models.numeric_range import RangeCheck
from dflash_mlx.models.resolve import find_names, target_names
from dflash_mlx.models.target_loading import find_target
from kernels_metal.dispatch import Mode


def load(model: str | None = None, drafter: str | None = None) -> Pair:
    """Load a target and its drafter.

    model: a Hugging Face id, a local folder, or the folder of a converted pair; the embedded
    target by default. drafter: an id or a folder; by default the one that models.toml knows for
    the target. Where it knows none, or that one cannot be had, `Pair.undrafted` says so and the
    pair drafts by n-gram lookup. Raises DFlashError for what cannot be found or read, and for a
    drafter that was asked for and does not fit.
    """
    return load_pair(PairConfig(model, drafter))


def load_pair(config: PairConfig, *uses: DecodeConfig) -> Pair:
    """`load` from settings; whether all fits is checked before weights are read.

    On the hub it is checked before they are downloaded, by configurations and the heads of weight
    files, unless the hub does not answer such questions.
    uses: settings that the pair will be used with; DFlashError where it cannot serve them.
    """
    names = find_names(config)
    drafters = choose(names, uses).each(checked)
    means = Means(len(drafters.configs), advice=names.advice)
    check_uses(uses, [c.block_size for c in drafters.configs], means, drafters.missing)
    files = find_target(names)
    drafters = drafters.each(fitting(files.facts))
    files.facts.raise_first()
    drafters = drafters.each(downloaded)
    target, tokenizer = files.load()
    target.kv_bits = config.kv_bits
    configs = [limit_windows(c, config.draft_window) for c in drafters.configs]
    ranges = RangeCheck(target, configs)
    loaded = [
        ranges.widened(load_network(d.folder, c, target.dtype, config.drafter_bits), c)
        for d, c in zip(drafters.drafters, configs, strict=True)
    ]
    target.use_kernels(cast(Mode, config.kernels))
    packed = already_packed(drafters, config.drafter_bits)
    notes = (*drafters.notes, *packed, *ranges.notes)
    models = tuple(BlockModel(n, c, target) for n, c in zip(loaded, configs, strict=True))
    name = names.drafter if models else None
    return Pair(target, tokenizer, models, name, drafters.missing, names.advice, notes)


def load_target(name: str | None = None) -> Pair:
    """A target alone, the default one without a name; raises as `load` does.

    Its kernels are off: they have no gradients, and batch work has more rows than they take.
    """
    return Pair(*find_target(target_names(name)).load())
