"""`python -m dflash_mlx.train.selector`: give a trained drafter DFlash 2's candidate selector.

The drafts of one pass do not know each other. The selector (see `drafters/dflash/selector.py`)
weighs every candidate by the token that is drafted before it. It alone is trained here, the
drafter stays as it is. The answers should be many. They can be those that the drafter was trained
on, as long as it is not much surer of those than of others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from dflash_mlx.cli import options as cli
from dflash_mlx.core.config import ALL_BUT_MODEL, PairConfig, SelectorTraining
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.selector import SelectorConfig
from dflash_mlx.models.load import load_target
from dflash_mlx.models.names import resolve_folder
from dflash_mlx.train.blocks import Blocks
from dflash_mlx.train.data import Texts, add_data_options, feature_place, read_texts
from dflash_mlx.train.evaluate import measure, rank_in_parts
from dflash_mlx.train.maps import EmbeddingRows, MappedSelector, with_selector
from dflash_mlx.train.steps import Training
from dflash_mlx.train.trainee import Trainee
from dflash_mlx.train.vocabulary import draft_size

PROGRAM = "dflash_mlx.train.selector"
_LEAST = 1e-6  # probability of all other tokens together
_BEHIND = 0.25  # weight of a position behind a wrong draft, where decoding seldom comes


class SelectorTrainer(Training[SelectorTraining]):
    """Trains the maps on blocks at random anchors of texts. trainee: without a selector."""

    def __init__(self, trainee: Trainee, texts: Texts, config: SelectorTraining) -> None:
        rows = EmbeddingRows(trainee.target.embedding(), trainee.config.vocab_size)
        self.maps = MappedSelector(trainee.config.hidden_size, config.rank, rows, config.seed)
        super().__init__(self.maps, trainee, texts, config)

    def batch(self, blocks: Blocks) -> tuple[mx.array, ...]:
        """What the loss takes, for N = S * A * (B - 1) positions; see there."""
        states = self.trainee.states(*self.trainee.inputs(self._texts, blocks))
        states, vocabulary = states[:, :, 1:].flatten(0, 2), self.vocabulary
        ranked = rank_in_parts(vocabulary.logits, states, self.config.top_k)
        tokens = vocabulary.tokens[ranked.tokens]
        labels = blocks.labels[..., 1:]
        right = tokens == labels.reshape(-1, 1)
        counted = blocks.supervised[..., 1:] & (vocabulary.index[labels] >= 0)
        reached = np.ones(labels.shape, bool)  # up to and with a block's first wrong draft
        reached[..., 1:] = np.cumprod(right[:, 0].reshape(labels.shape)[..., :-1], axis=-1)
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
    place = feature_place(arguments)
    config = cli.read_options(arguments, SelectorTraining)
    if arguments.out.exists() and (arguments.out.is_file() or any(arguments.out.iterdir())):
        raise DFlashError(f"{arguments.out} is there already", "choose another folder with --out")
    pair = load_target(cli.read_pair_config(arguments).model)
    folder = resolve_folder(arguments.drafter, "drafter")
    trainee = Trainee.read(folder, pair.target).without_selector()
    most = draft_size(config.draft_vocabulary, trainee.config.vocab_size)
    if config.top_k > most:
        raise DFlashError(
            f"top_k is {config.top_k}, more than the {most} tokens of the draft vocabulary",
            "choose fewer with --top-k, or more with --draft-vocabulary",
        )
    texts = read_texts(arguments.corpus, pair, trainee.config.target_layer_ids, place)
    train, held_out = texts.split(config.held_out)
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(f"without a selector: {measure(trainee, held_out).describe()}", file=sys.stderr)
    trainer = SelectorTrainer(trainee, train, config)
    print(trainer.vocabulary.describe(), file=sys.stderr)
    for _ in trainer.show(trainer.losses()):
        pass
    selected = with_selector(trainee, trainer.maps, SelectorConfig(config.rank, config.top_k))
    print(f"with one: {measure(selected, held_out).describe()}", file=sys.stderr)
    selected.save(arguments.out)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(
        prog=PROGRAM,
        description="Train a candidate selector for a drafter; the drafter stays as it is.",
    )
    result.add_argument("--drafter", required=True, help="a DFlash drafter that fits the model")
    result.add_argument("--out", required=True, type=Path, help="new folder for both together")
    add_data_options(result)
    cli.add_options(result, PairConfig, SelectorTraining, without=ALL_BUT_MODEL)
    return result


if __name__ == "__main__":
    cli.run(main, PROGRAM)
