"""The methods of `--method`, by name."""

from __future__ import annotations

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.adaptive import Adaptive
from dflash_mlx.drafters.auto import settle
from dflash_mlx.drafters.best_first import BestFirst
from dflash_mlx.drafters.block_diffusion import BlockDiffusion
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.drawn import DrawnBlock
from dflash_mlx.drafters.dual_diffusion import DualDiffusion, Growth, JointGrowth, PaperGrowth
from dflash_mlx.drafters.ngram import NGram
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.drafters.resample import Resample
from dflash_mlx.drafters.selected import DrawnPath, SelectedPath
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.models.load import Pair
from dflash_mlx.models.parts import require_drafter
from dflash_mlx.target.pass_times import stored_times

MOST_NODES = 48  # of a tree that the budget then cuts


def _none(pair: Pair, config: DecodeConfig) -> Drafter:
    return NoDraft()


def _ngram(pair: Pair, config: DecodeConfig) -> Drafter:
    return NGram(config.block_size)


def _dflash(pair: Pair, config: DecodeConfig) -> Drafter:
    model = _first(pair)
    is_plain = model.config.selector is None
    if config.draws_drafts:
        drawn = DrawnBlock if is_plain else DrawnPath
        return drawn(model, config.block_size, config.sampling)
    greedy = BlockDiffusion if is_plain else SelectedPath
    return greedy(model, config.block_size)


def _ddtree(pair: Pair, config: DecodeConfig) -> Drafter:
    pair.target.check_trees()
    drafter = BestFirst(_first(pair), config.block_size, config.budget or MOST_NODES)
    return _within_budget({"draft": drafter}, pair, config)


def _resample(pair: Pair, config: DecodeConfig) -> Drafter:
    pair.target.check_trees()
    seed = config.sampling.with_seed().seed or 0
    return Resample(_first(pair), config.block_size, config.branches, seed)


def _d2sd(pair: Pair, config: DecodeConfig) -> Drafter:
    pair.target.check_trees()
    first, second = _first(pair), None
    if pair.second_network is not None and pair.second_config is not None:
        second = BlockModel(pair.second_network, pair.second_config, pair.target)
    growth: Growth = JointGrowth(config.branches, config.budget or MOST_NODES)
    if config.growth == "paper":
        growth = PaperGrowth(config.branches)
    both = DualDiffusion(first, second, config.block_size, growth)
    if config.growth == "paper":
        return both
    alone = BestFirst(first, both.block_size, MOST_NODES)
    return _within_budget({"first draft": alone, "both drafts": both}, pair, config)


def _within_budget(drafters: dict[str, Drafter], pair: Pair, config: DecodeConfig) -> Drafter:
    """The last drafter itself where the number of nodes is given, else whatever pays here.

    Pass times stay with the target, what sessions have learned with the pair.
    """
    last = list(drafters.values())[-1]
    if config.budget is not None:
        return last
    if pair.target.pass_times is None:  # once per model that is loaded
        pair.target.pass_times = stored_times(pair.target, config.recalibrate)
    adaptive = Adaptive(last.name, drafters, pair.target.pass_times, config.lookup)
    used = (pair.drafter_name, pair.second_network is None, pair.target.kernels.mode)
    key = (*used, config.method, config.block_size, config.branches, config.lookup)
    if key in pair.experience:
        adaptive.experience = pair.experience[key]
    else:
        adaptive.time_drafts(pair.target)
        pair.experience[key] = adaptive.experience
    return adaptive


def _first(pair: Pair) -> BlockModel:
    problem = pair.undrafted or f"no drafter is known for {pair.target.name}"
    network_config = require_drafter(pair.network_config, problem)
    assert pair.network is not None
    return BlockModel(pair.network, network_config, pair.target)


METHODS = {
    "none": _none,
    "ngram": _ngram,
    "dflash": _dflash,
    "ddtree": _ddtree,
    "d2sd": _d2sd,
    "resample": _resample,
}


def make_drafter(pair: Pair, config: DecodeConfig) -> Drafter:
    """The drafter of `config.method`; DFlashError when the pair has none that fits."""
    config = settle(config, pair.means)
    return METHODS[config.method](pair, config)
