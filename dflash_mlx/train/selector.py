"""`python -m dflash_mlx.train.selector`: give a trained drafter DFlash 2's candidate selector.

It weighs every candidate by the token that is drafted before it. It alone is trained here, best
on many answers of which the drafter is not much surer than of others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from dflash_mlx.cli import options as cli
from dflash_mlx.core.config import ALL_BUT_MODEL, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import require
from dflash_mlx.drafters.dflash.fields import VERSION_2
from dflash_mlx.drafters.dflash.paths import CandidateSelector
from dflash_mlx.drafters.networks.files import parameters_of
from dflash_mlx.models.load import load_target
from dflash_mlx.models.names import find_source
from dflash_mlx.train.acceptance import in_words, measure_drafts
from dflash_mlx.train.blocks import Blocks
from dflash_mlx.train.config import DataConfig, SelectorTraining
from dflash_mlx.train.data import Texts, rank_in_parts, read_texts
from dflash_mlx.train.dflash import DFlashTrainee
from dflash_mlx.train.loss import draft_size
from dflash_mlx.train.trainer import Training

PROGRAM = "dflash_mlx.train.selector"
_ROWS = 4096  # of a codebook that are computed at once
_SAMPLE = 1024  # tokens whose rows give the scale
_LEAST = 1e-6  # probability of all other tokens together
_BEHIND = 0.25  # weight of a position behind a wrong draft, where decoding seldom comes


class MappedSelector(nn.Module):
    """A selector whose codebooks are linear maps of the target's embedding.

    So what is learned from one token holds for its like, and tokens that no text had are not noise.
    The embedding is taken in float32 and scaled so that its rows are about of length one.
    """

    def __init__(self, embedding: nn.Module, vocabulary: int, rank: int, seed: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        ids = mx.array(np.linspace(0, vocabulary - 1, _SAMPLE).astype(int))
        sample = embedding(ids).astype(mx.float32)
        scale = 1 / mx.linalg.norm(sample, axis=-1).mean()
        # A function: the embedding as a module in this one might be trained, too.
        self._rows = lambda tokens: embedding(tokens).astype(mx.float32) * scale
        keys = mx.random.split(mx.random.key(seed), 3)
        d, sizes = sample.shape[1], (2.0, 2.0, 0.3)  # of what maps give; their product starts small
        self.predecessor, self.successor, self.hidden = (
            mx.random.normal((d, rank), key=key) * (size * d**-0.5)
            for key, size in zip(keys, sizes, strict=True)
        )

    def __call__(self, hidden: mx.array, before: mx.array, tokens: mx.array) -> mx.array:
        """[N, k] edges from tokens before [N] to candidates [N, k] at states [N, d]."""
        context = (self._rows(before) @ self.predecessor) * (hidden @ self.hidden)
        edges: mx.array = (self._rows(tokens) @ self.successor) @ context[..., None]
        return edges[..., 0]

    def selector(self, top_k: int) -> CandidateSelector:
        starts = range(0, self._vocabulary, _ROWS)
        ids = [mx.arange(i, min(i + _ROWS, self._vocabulary)) for i in starts]
        d, rank = self.hidden.shape
        result = CandidateSelector(self._vocabulary, d, rank, top_k)
        result.predecessor_codebook, result.successor_codebook = (
            mx.concatenate([self._rows(i) @ map_ for i in ids])
            for map_ in (self.predecessor, self.successor)
        )
        result.hidden_projection.weight = self.hidden.T
        mx.eval(result.parameters())
        return result


def with_selector(trainee: DFlashTrainee, maps: MappedSelector, top_k: int) -> DFlashTrainee:
    """The drafter as version 2, with a selector, and convolutions that are the identity."""
    method = {
        **trainee.raw["dflash_config"],
        "block_size": trainee.config.block_size,
        "conv_group_size": trainee.config.hidden_size,
        "conv_kernel_size": 1,
        "selector_rank": maps.hidden.shape[1],
        "selector_top_k": top_k,
    }
    plain = {name: value for name, value in trainee.raw.items() if name != "block_size"}
    raw = {**plain, "architectures": [VERSION_2], "dflash_config": method}
    result = DFlashTrainee.of(raw, trainee.target, parameters_of(trainee.network))
    selector: Any = tree_flatten({"candidate_selector": maps.selector(top_k).parameters()})
    weights = {**parameters_of(trainee.network), **dict(selector)}
    for name, array in parameters_of(result.network).items():
        if "_conv." in name:
            weights[name] = (mx.ones if name.endswith("base_kernel") else mx.zeros)(array.shape)
    result.network.load_weights(list(weights.items()))
    mx.eval(result.network.parameters())
    return result


class SelectorTrainer(Training):
    """Trains the maps on blocks at random anchors of texts. trainee: without a selector."""

    config: SelectorTraining

    def __init__(self, trainee: DFlashTrainee, texts: Texts, config: SelectorTraining) -> None:
        embedding = trainee.target.embedding()
        self.maps = MappedSelector(embedding, trainee.config.vocab_size, config.rank, config.seed)
        law: dict[str, Any] = {"prefix_base": config.prefix_base} if trainee.sees_prefixes else {}
        super().__init__(self.maps, trainee, texts, config, **law)

    def batch(self, blocks: Blocks) -> tuple[mx.array, ...]:
        states = self.trainee.states(*self.trainee.inputs(self._texts, blocks))
        states, vocabulary = states[:, :, 1:].flatten(0, 2), self.vocabulary
        ranked = rank_in_parts(vocabulary.logits, states, self.config.top_k)
        tokens = vocabulary.tokens[ranked.tokens]
        labels = blocks.labels[..., 1:]
        right = tokens == labels.reshape(-1, 1)
        counted = blocks.supervised[..., 1:] & (vocabulary.index[labels] >= 0)
        reached = np.ones(labels.shape, bool)  # up to and with a block's first wrong draft
        visible = np.arange(1, labels.shape[-1]) <= blocks.prefixes[..., None]
        hits = right[:, 0].reshape(labels.shape)[..., :-1] | visible
        reached[..., 1:] = np.cumprod(hits, axis=-1)
        weights = (np.where(reached, 1.0, _BEHIND) * counted).astype(np.float32).reshape(-1)
        before = blocks.tokens[..., :-1].reshape(-1)
        arrays = (before, tokens, ranked.logprobs, right, weights)
        return states, *(mx.array(array) for array in arrays)

    def _loss(self, batch: tuple[mx.array, ...]) -> mx.array:
        """Weighted mean of the cross-entropy over the candidates and all other tokens together.

        The others keep their plain probability, as if the draft vocabulary were all there is, so
        that what a tree goes by is learned as well as the order of the candidates.
        batch: states [N, d]; the tokens before [N]; the candidates [N, k], their log-probabilities
        and which of them is right; weights [N].
        """
        states, before, tokens, logprobs, right, weights = batch
        scores = logprobs + self.maps(states, before, tokens)
        others = mx.log(mx.maximum(1 - mx.exp(logprobs).sum(axis=-1), _LEAST))
        whole = mx.logaddexp(mx.logsumexp(scores, axis=-1), others)
        among = right.any(axis=-1)
        picked = mx.where(among, mx.where(right, scores, 0.0).sum(axis=-1), others) - whole
        return -(weights * picked).sum() / mx.maximum(weights.sum(), 1e-9)


def main(argv: Sequence[str]) -> None:
    """Train until the time or the steps are used up. Raises DFlashError for bad input."""
    arguments = parser().parse_args(argv)
    data = cli.read_options(arguments, DataConfig)
    config = cli.read_options(arguments, SelectorTraining)
    if arguments.out.exists() and (arguments.out.is_file() or any(arguments.out.iterdir())):
        raise DFlashError(f"{arguments.out} already exists", "choose another folder with --out")
    pair = load_target(cli.read_pair_config(arguments).model)
    folder = find_source(arguments.drafter, "drafter").fetch().here
    trainee = DFlashTrainee.read(folder, pair.target).without_selector()
    most = draft_size(config.draft_vocabulary, trainee.config.vocab_size)
    allowed = f"up to {most}, or a --draft-vocabulary of more than {most} tokens"
    require(config.top_k <= most, "top_k", config.top_k, allowed)
    texts = read_texts(data, pair, trainee.aux_layers)
    train, held_out = texts.split(config.held_out)
    arguments.out.mkdir(parents=True, exist_ok=True)

    def figures(drafter: DFlashTrainee) -> str:
        return in_words(*measure_drafts(drafter, held_out, trainee.sees_prefixes))

    print(f"without a selector: {figures(trainee)}", file=sys.stderr)
    trainer = SelectorTrainer(trainee, train, config)
    print(trainer.vocabulary.describe(), file=sys.stderr)
    for _ in trainer.show(trainer.losses()):
        pass
    selected = with_selector(trainee, trainer.maps, config.top_k)
    print(f"with one: {figures(selected)}", file=sys.stderr)
    selected.save(arguments.out)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(
        prog=PROGRAM,
        description="Train a candidate selector for a drafter; the drafter stays as it is.",
    )
    result.add_argument("--drafter", required=True, help="a DFlash drafter that fits the model")
    result.add_argument("--out", required=True, type=Path, help="new folder for both together")
    cli.add_options(result, PairConfig, without=ALL_BUT_MODEL)
    cli.add_options(result, DataConfig, SelectorTraining)
    return result


if __name__ == "__main__":
    cli.run(main, PROGRAM)
