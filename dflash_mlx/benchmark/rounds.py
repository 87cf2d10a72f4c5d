"""What became of every round's draft: acceptance histogram, reliability, rows by merging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.dual_diffusion import BRANCHES
from dflash_mlx.session.stream import TextDelta
from dflash_mlx.target.pass_times import PassTimes

BINS = 10  # of confidence, equally wide


@dataclass(frozen=True)
class Checked:
    """A drafted token that was compared with the target's choice, its parent being accepted.

    confidence: its probability as its drafter sees it, given the tokens before it.
    """

    depth: int
    confidence: float
    accepted: bool


@dataclass(frozen=True)
class Round:
    """A round after the fact.

    tokens: committed, without what a stop cut off. rows: nodes that the target verified.
    separate_rows: what they would be if every branch were a block of its own, as D2SD is published;
    None for methods that do not merge blocks. checked: () where the tree has no confidences.
    """

    tokens: int
    rows: int
    separate_rows: int | None
    checked: tuple[Checked, ...]

    @classmethod
    def of(cls, delta: TextDelta, config: DecodeConfig) -> Round:
        """The round behind one delta of an answer that was decoded with `config`."""
        tree = delta.accepted.tree
        separate = separate_rows(config, max(tree.depths) + 1)
        return cls(len(delta.tokens), len(tree), separate, checked(delta.accepted))


def separate_rows(config: DecodeConfig, block: int) -> int | None:
    """Rows of the first draft and of every branch as separate blocks of `block` tokens.

    D2SD continues K prefixes of the first draft, of which a block has block - 1; a lone anchor has
    nothing to branch from.
    """
    branches = config.branches or BRANCHES
    if config.method == "d2sd" and config.growth == "paper":
        branches = min(branches, block - 1)
    elif config.method != "resample":
        return None
    return (branches + 1) * block if block > 1 else 1


def checked(accepted: Accepted) -> tuple[Checked, ...]:
    """The children of all nodes on the accepted path."""
    tree, path = accepted.tree, set(accepted.path)
    if not tree.logprobs:
        return ()
    return tuple(
        Checked(tree.depths[i], exp(tree.logprobs[i]), i in path)
        for i in range(1, len(tree))
        if tree.parents[i] in path
    )


def committed(rounds: Sequence[Round]) -> dict[str, int]:
    """Acceptance histogram: how many rounds committed 1, 2, ... tokens."""
    counts = Counter(round_.tokens for round_ in rounds)
    return {str(tokens): counts[tokens] for tokens in range(1, max(counts, default=0) + 1)}


def reliability(rounds: Sequence[Round]) -> dict[str, Any] | None:
    """Reliability diagram over all depths and for depth 1 alone; None without confidences."""
    every = [node for round_ in rounds for node in round_.checked]
    if not every:
        return None
    return {"all": _diagram(every), "depth 1": _diagram([n for n in every if n.depth == 1])}


def _diagram(nodes: Sequence[Checked]) -> dict[str, Any]:
    """Per bin of confidence: nodes, their mean confidence, and the share that was accepted.

    calibration_error: mean distance of the last two, weighted by nodes (arXiv 1706.04599).
    """
    bins: list[list[Checked]] = [[] for _ in range(BINS)]
    for node in nodes:
        bins[min(int(node.confidence * BINS), BINS - 1)].append(node)
    found = [
        {
            "bin": i,
            "nodes": len(members),
            "confidence": sum(node.confidence for node in members) / len(members),
            "accepted": sum(node.accepted for node in members) / len(members),
        }
        for i, members in enumerate(bins)
        if members
    ]
    apart = sum(each["nodes"] * abs(each["confidence"] - each["accepted"]) for each in found)
    return {"calibration_error": apart / len(nodes), "bins": found}


def merging(rounds: Sequence[Round], times: PassTimes | None) -> dict[str, float] | None:
    """Rows per round, merged and as separate blocks, and the target's pass over them by `times`.

    The pass over separate blocks is not run: its time is that of a tree of as many rows, and a
    lower bound beyond the widest tree that was timed. None for methods that do not merge blocks.
    """
    both = [(r.rows, r.separate_rows) for r in rounds if r.separate_rows is not None]
    if not both:
        return None
    merged, separate = zip(*both, strict=True)
    result = {"merged_rows": sum(merged) / len(both), "separate_rows": sum(separate) / len(both)}
    if times is not None:
        for name, rows in (("merged_ms", merged), ("separate_ms", separate)):
            result[name] = 1e3 * sum(float(times.of(n)) for n in rows) / len(both)
    return result
