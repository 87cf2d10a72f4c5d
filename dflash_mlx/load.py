"""From names to a pair: a target with its tokenizer, and a drafter that fits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from dflash_mlx.compatibility import check_drafter, check_pair
from dflash_mlx.config import DecodeConfig, PairConfig
from dflash_mlx.drafters.auto import Means, settle
from dflash_mlx.drafters.checkpoint import check_block_size, load_network, read_config
from dflash_mlx.drafters.context import limit_windows
from dflash_mlx.drafters.network import Network, NetworkConfig
from dflash_mlx.errors import DFlashError
from dflash_mlx.numeric_range import RangeCheck
from dflash_mlx.registry import Advice
from dflash_mlx.resolve import Names, drafter_folder, find_names, target_names
from dflash_mlx.target import Target
from dflash_mlx.target_loading import TargetFiles, find_target
from kernels_metal.dispatch import Mode

DRAFTED = ("dflash", "ddtree", "d2sd", "resample")  # methods that need a drafter network


@dataclass(frozen=True)
class Pair:
    """A target with its tokenizer, and the drafter networks that fit it, if any.

    tokenizer: mlx-lm's TokenizerWrapper. second_network: D2SD's variable-prefix drafter.
    experience: what sessions have learned about drafting, by method and settings. undrafted: why
    there is no drafter, where none was found. advice: how the pair is best used.
    notes: what loading had to change, a sentence each.
    """

    target: Target
    tokenizer: Any
    network: Network | None = None
    network_config: NetworkConfig | None = None
    drafter_name: str | None = None
    second_network: Network | None = None
    second_config: NetworkConfig | None = None
    experience: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    undrafted: str = ""
    advice: Advice = Advice()
    notes: tuple[str, ...] = ()

    @property
    def fallback(self) -> str:
        """What `auto` does for want of a drafter, "" where there is one."""
        return f"{self.undrafted}, so drafts are n-gram lookups" if self.undrafted else ""

    @property
    def means(self) -> Means:
        """What there is to draft with."""
        networks = (self.network is not None) + (self.second_network is not None)
        return Means(networks, _takes_trees(self.target), self.advice)


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
    """`load` from settings; whether all fits is checked before weights are fetched or read.

    uses: settings that the pair will be used with; DFlashError where it cannot serve them.
    """
    names = find_names(config)
    drafters = _find_drafters(names, uses)
    _check_uses(uses, drafters, names)
    files = find_target(names)
    drafters = _that_fit(drafters, files, names, uses)
    target, tokenizer = files.load()
    target.kv_bits = config.kv_bits
    configs = [limit_windows(d.config, config.draft_window) for d in drafters.found]
    ranges = RangeCheck(target, configs)
    loaded = [
        ranges.widened(load_network(d.folder, c, target.dtype, config.drafter_bits), c)
        for d, c in zip(drafters.found, configs, strict=True)
    ]
    target.use_kernels(cast(Mode, config.kernels))
    notes = tuple(ranges.notes)
    pair = Pair(target, tokenizer, undrafted=drafters.missing, advice=names.advice, notes=notes)
    if loaded:
        pair = replace(pair, network=loaded[0], network_config=configs[0])
        pair = replace(pair, drafter_name=names.drafter)
    if len(loaded) > 1:
        pair = replace(pair, second_network=loaded[1], second_config=configs[1])
    return pair


def load_target(name: str | None = None) -> Pair:
    """A target alone, the default one without a name; raises as `load` does.

    Its kernels are off: they have no gradients, and batch work has more rows than they take.
    """
    return Pair(*find_target(target_names(name)).load())


def require_drafter(config: NetworkConfig | None, problem: str) -> NetworkConfig:
    """The drafter's configuration, or DFlashError with the problem where there is no drafter."""
    if config is None:
        raise DFlashError(problem, "name one with --drafter, or use --method none")
    return config


@dataclass(frozen=True)
class _DrafterFiles:
    """A drafter before its weights are read."""

    folder: Path
    config: NetworkConfig


@dataclass(frozen=True)
class _Drafters:
    """The drafters of a pair, the first and perhaps the second; or why there is none."""

    found: tuple[_DrafterFiles, ...] = ()
    missing: str = ""


def _find_drafters(names: Names, uses: Sequence[DecodeConfig]) -> _Drafters:
    """The drafters that `uses` need, downloaded if need be."""
    if names.drafter is None:
        return _Drafters(missing=f"no drafter is known for {names.shown}")
    wanted = [(names.drafter, "drafter")]
    methods = {settle(use, Means(2, advice=names.advice)).method for use in uses}
    if names.second_drafter is not None and (not uses or "d2sd" in methods):
        wanted.append((names.second_drafter, "second-drafter"))
    try:
        folders = [drafter_folder(name, option) for name, option in wanted]
        return _Drafters(tuple(_DrafterFiles(f, read_config(f)) for f in folders))
    except DFlashError as error:
        return _without(error, names, uses)


def _that_fit(
    drafters: _Drafters, files: TargetFiles, names: Names, uses: Sequence[DecodeConfig]
) -> _Drafters:
    try:
        facts = [check_drafter(drafter.folder) for drafter in drafters.found]
        if facts:
            check_pair(files.facts, *facts).raise_first()
        return drafters
    except DFlashError as error:
        return _without(error, names, uses)


def _without(error: DFlashError, names: Names, uses: Sequence[DecodeConfig]) -> _Drafters:
    """No drafter; the error itself where one was asked for, by name or by a method."""
    if not names.by_registry or any(use.method in DRAFTED for use in uses):
        raise error
    return _Drafters(missing=f"the drafter {names.drafter} cannot be used ({error.what})")


def _check_uses(uses: Sequence[DecodeConfig], drafters: _Drafters, names: Names) -> None:
    """Raise DFlashError for settings that need a drafter, or other blocks than there are."""
    configs = [drafter.config for drafter in drafters.found]
    for use in uses:
        if use.method in DRAFTED:
            require_drafter(next(iter(configs), None), drafters.missing)
        method = settle(use, Means(len(configs), advice=names.advice)).method
        if method in DRAFTED:
            check_block_size(use.block_size, configs[0])
        if method == "d2sd":
            check_block_size(use.block_size, configs[-1])


def _takes_trees(target: Target) -> bool:
    try:
        target.check_trees()
    except DFlashError:
        return False
    return True
