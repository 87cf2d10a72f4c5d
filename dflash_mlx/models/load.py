"""From names to a pair: a target with its tokenizer, and a drafter that fits it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.auto import Means
from dflash_mlx.drafters.dflash.network import Network, NetworkConfig
from dflash_mlx.models.names import find_names, target_names
from dflash_mlx.models.numeric_range import RangeCheck
from dflash_mlx.models.parts import TargetPart, already_packed, find_parts
from dflash_mlx.models.registry import Advice
from dflash_mlx.target.model import Target
from kernels_metal.dispatch import Mode


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
        """What there is to draft with; no block is advised beyond the drafter's own."""
        networks = (self.network is not None) + (self.second_network is not None)
        advice = self.advice
        if advice.block_size is not None and self.network_config is not None:
            most = min(advice.block_size, self.network_config.block_size)
            advice = replace(advice, block_size=most)
        return Means(networks, _takes_trees(self.target), advice)


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
    part, drafters = find_parts(names, uses)
    target, tokenizer = part.load()
    target.kv_bits = config.kv_bits
    ranges = RangeCheck(target, [drafter.config for drafter in drafters.parts])
    loaded = [drafter.load(config, target.dtype) for drafter in drafters.parts]
    loaded = [(ranges.widened(*drafter), drafter[1]) for drafter in loaded]
    target.use_kernels(cast(Mode, config.kernels))
    packed = already_packed(drafters, config.drafter_bits)
    notes = (*drafters.notes, *packed, *ranges.notes)
    undrafted = drafters.missing
    pair = Pair(target, tokenizer, undrafted=undrafted, advice=names.advice, notes=notes)
    if loaded:
        pair = replace(pair, network=loaded[0][0], network_config=loaded[0][1])
        pair = replace(pair, drafter_name=names.drafter)
    if len(loaded) > 1:
        pair = replace(pair, second_network=loaded[1][0], second_config=loaded[1][1])
    return pair


def load_target(name: str | None = None) -> Pair:
    """A target alone, the default one without a name; raises as `load` does.

    Its kernels are off: they have no gradients, and batch work has more rows than they take.
    """
    part = TargetPart(target_names(name)).checked()
    part.facts.raise_first()
    return Pair(*part.fetched().load())


def _takes_trees(target: Target) -> bool:
    try:
        target.check_trees()
    except DFlashError:
        return False
    return True
