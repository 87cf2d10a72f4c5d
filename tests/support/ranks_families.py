"""Parts of many tiny models on several ranks: what they say, against the whole models."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.core.tree import Tree
from dflash_mlx.ranks.group import END, Ranks, join
from dflash_mlx.ranks.loading import split
from dflash_mlx.ranks.target import Follower, Leader
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import Rows
from support.families import make_model

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama in 4 bits": {"intermediate_size": 128},  # in whole groups on every rank
    "llama_sliding": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "ministral3": {},
    "deepseek_v3": {},
    "qwen3_5": {},
    "qwen3_5 with a head": {"tie_word_embeddings": False, "vocab_size": 98},
}
PROMPT = [7, 3, 9, 4, 4, 9, 7]
TREE = Tree((5, 6, 7, 8, 9), (-1, 0, 0, 1, 1, 2))
CONTEXT = 200


def make(case: str) -> Any:
    """The model of a case, with equal weights on every rank."""
    family, _, how = case.partition(" ")
    model = make_model(family, **CASES[case])
    if how == "in 4 bits":
        nn.quantize(model, group_size=32, bits=4)
    return model


def said(target: Target) -> list[mx.array]:
    """Logits of a prompt, of a tree behind it, and of two sequences at once."""
    cache = target.new_cache()
    found = [target.forward(mx.array(PROMPT), cache, Block(len(PROMPT)))[0]]
    cache.commit(range(len(PROMPT)))
    tree = TREE if target.takes_trees else Tree.chain(range(5, 10))
    found.append(target.forward(mx.array(PROMPT[:6]), cache, Block.of(tree))[0])
    cache.commit([0, 2, 5] if target.takes_trees else [0, 1])
    rows = [Rows(mx.array([3, 4]), each, Block(2)) for each in (cache, cache.fork())]
    found += [logits for logits, _ in target.forward_all(rows)]
    mx.eval(found)
    return found


def main(argv: Sequence[str], ranks: Ranks) -> None:
    """Write how far off each is at most."""
    far = {}
    for case in CASES:
        split(part := make(case), ranks.group, case)
        if ranks.rank:
            Follower(Target(part, CONTEXT, case), ranks).replay()
            continue
        parts = said(Leader(part, CONTEXT, case, ranks))
        ranks.share([[END]])
        whole = said(Target(make(case), CONTEXT, case))
        far[case] = max(mx.abs(a - b).max().item() for a, b in zip(parts, whole, strict=True))
    if not ranks.rank:
        Path(argv[0]).write_text(json.dumps(far))


if __name__ == "__main__":
    main(sys.argv[1:], join())
