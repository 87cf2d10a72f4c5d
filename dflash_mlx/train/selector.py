"""`python -m dflash_mlx.train.selector`: give a trained drafter DFlash 2's candidate selector.

The drafts of one pass do not know each other. The selector (see `drafters/selector.py`) weighs
every candidate by the token that is drafted before it. It alone is trained here, the drafter stays
as it is. The answers should be many. They can be those that the drafter was trained on, as long as
it is not much surer of those than of others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from tqdm import tqdm

from dflash_mlx.cli import options as cli
from dflash_mlx.core.config import ALL_BUT_MODEL, PairConfig, SelectorTraining
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.save import save_drafter
from dflash_mlx.drafters.dflash.selector import SelectorConfig
from dflash_mlx.models.load import load_target
from dflash_mlx.models.names import resolve_folder
from dflash_mlx.train.blocks import SAMPLERS, Array, Blocks
from dflash_mlx.train.data import Texts, add_data_options, feature_place, read_texts
from dflash_mlx.train.evaluate import Drafter, embed, measure, rank_in_parts, shares
from dflash_mlx.train.maps import EmbeddingRows, MappedSelector, with_selector
from dflash_mlx.train.packed import hidden_states
from dflash_mlx.train.schedule import share_of_peak
from dflash_mlx.train.start import open_drafter, without_selector
from dflash_mlx.train.vocabulary import DraftVocabulary, draft_size

PROGRAM = "dflash_mlx.train.selector"
_LEAST = 1e-6  # probability of all other tokens together
_BEHIND = 0.25  # weight of a position behind a wrong draft, where decoding seldom comes


class SelectorTrainer:
    """Trains the maps on blocks at random anchors of texts. drafter: without a selector."""

    def __init__(self, drafter: Drafter, texts: Texts, config: SelectorTraining) -> None:
        self.config, self.step = config, 0
        self._drafter, self._texts = drafter, texts
        network_config, target = drafter.config, drafter.target
        d = network_config.hidden_size
        rows = EmbeddingRows(target.embedding(), network_config.vocab_size)
        self.maps = MappedSelector(d, config.rank, rows, config.seed)
        self._optimizer = optim.AdamW(
            learning_rate=0.0, betas=[0.9, 0.95], weight_decay=0.01, bias_correction=True
        )
        self._gradients = nn.value_and_grad(self.maps, self._loss)
        shape = config.sequences, config.anchors
        sampler = SAMPLERS[config.anchor_law]
        self._sampler = sampler(texts.sequences, network_config.block_size, shape, config.seed)
        self.vocabulary = DraftVocabulary(target, network_config, texts, config.draft_vocabulary)

    def train_step(self, progress: float) -> float:
        """One step; returns its loss. progress: of the run, from 0 to 1."""
        config = self.config
        share = share_of_peak(self.step, config.warmup, progress)
        self._optimizer.learning_rate = config.learning_rate * share
        blocks = self._sampler.blocks(self.step)
        loss, gradients = self._gradients(*self._batch(blocks))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        self._optimizer.update(self.maps, gradients)
        mx.eval(self.maps.parameters(), self._optimizer.state, loss)
        self.step += 1
        return float(loss)

    def _batch(self, blocks: Blocks) -> tuple[mx.array, ...]:
        """What `_loss` takes, for N = S * A * (B - 1) positions."""
        drafter = self._drafter
        config, target = drafter.config, drafter.target
        x = embed(target, config, blocks.inputs(config.mask_token_id))
        features = self._texts.features(blocks.rows, int(blocks.anchors.max()))
        states = hidden_states(drafter.network, config, features, mx.array(blocks.anchors), x)
        states = states[:, :, 1:].flatten(0, 2)
        vocabulary = self.vocabulary
        ranked = rank_in_parts(vocabulary.logits, states, self.config.top_k)
        tokens = vocabulary.tokens[ranked.tokens]
        labels = blocks.labels[..., 1:]
        right = tokens == labels.reshape(-1, 1)
        counted = blocks.supervised[..., 1:] & (vocabulary.index[labels] >= 0)
        weights = position_weights(right[:, 0].reshape(labels.shape), counted).reshape(-1)
        before = blocks.tokens[..., :-1].reshape(-1)
        arrays = (before, tokens, ranked.logprobs, right, weights)
        return states, *(mx.array(array) for array in arrays)

    def _loss(
        self,
        states: mx.array,
        before: mx.array,
        tokens: mx.array,
        logprobs: mx.array,
        right: mx.array,
        weights: mx.array,
    ) -> mx.array:
        """Weighted mean of the cross-entropy over the candidates and all other tokens together.

        The others keep their plain probability, as if the draft vocabulary were all there is, so
        that what a tree goes by is learned as well as the order of the candidates.
        states: [N, d]. before: [N], the tokens before. tokens, logprobs, right: [N, k], the
        candidates, and which of them is right. weights: [N].
        """
        scores = logprobs + self.maps(states, before, tokens)
        others = mx.log(mx.maximum(1 - mx.exp(logprobs).sum(axis=-1), _LEAST))
        whole = mx.logaddexp(mx.logsumexp(scores, axis=-1), others)
        among = right.any(axis=-1)
        picked = mx.where(among, mx.where(right, scores, 0.0).sum(axis=-1), others) - whole
        return -(weights * picked).sum() / mx.maximum(weights.sum(), 1e-9)


def position_weights(right: Array, counted: Array) -> Array:
    """1 up to and with the first wrong draft of a block, `_BEHIND` after it, 0 if not counted.

    right: [..., n], whether the likeliest token of the draft vocabulary is. counted: [..., n].
    """
    reached = np.ones(right.shape, bool)
    reached[..., 1:] = np.cumprod(right[..., :-1], axis=-1)
    weights: Array = np.where(reached, 1.0, _BEHIND) * counted
    return weights.astype(np.float32)


def main(argv: Sequence[str]) -> None:
    """Train until the time or the steps are used up. Raises DFlashError for bad input."""
    arguments = parser().parse_args(argv)
    place = feature_place(arguments)
    config = cli.read_options(arguments, SelectorTraining)
    if arguments.out.exists() and (arguments.out.is_file() or any(arguments.out.iterdir())):
        raise DFlashError(f"{arguments.out} is there already", "choose another folder with --out")
    pair = load_target(cli.read_pair_config(arguments).model)
    found = open_drafter(resolve_folder(arguments.drafter, "drafter"), pair.target)
    network, network_config, raw = without_selector(*found)
    most = draft_size(config.draft_vocabulary, network_config.vocab_size)
    if config.top_k > most:
        raise DFlashError(
            f"top_k is {config.top_k}, more than the {most} tokens of the draft vocabulary",
            "choose fewer with --top-k, or more with --draft-vocabulary",
        )
    texts = read_texts(arguments.corpus, pair, network_config.target_layer_ids, place)
    train, held_out = texts.split(config.held_out)
    drafter = Drafter(network, network_config, pair.target)
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(f"without a selector: {describe(drafter, held_out)}", file=sys.stderr)
    trainer = SelectorTrainer(drafter, train, config)
    print(trainer.vocabulary.describe(train), file=sys.stderr)
    with tqdm(total=100, unit="%", bar_format="{l_bar}{bar}| {elapsed} {postfix}") as bar:
        for progress, loss in steps(trainer):
            bar.n = round(100 * progress, 1)
            bar.set_postfix_str(f"step {trainer.step} loss {loss:.3f}")
    shape = SelectorConfig(config.rank, config.top_k)
    selected, selected_raw = with_selector(drafter, raw, trainer.maps, shape)
    print(f"with one: {describe(selected, held_out)}", file=sys.stderr)
    save_drafter(arguments.out, selected.network, selected_raw)


def steps(trainer: SelectorTrainer) -> Iterator[tuple[float, float]]:
    """How far the run is, from 0 to 1, and the loss, after every step."""
    config, started = trainer.config, time.perf_counter()
    progress = 0.0
    while progress < 1:
        loss = trainer.train_step(progress)
        if config.steps is not None:
            progress = trainer.step / config.steps
        else:
            progress = (time.perf_counter() - started) / (60 * config.minutes)
        yield min(progress, 1.0), loss


def describe(drafter: Drafter, held_out: Texts) -> str:
    """One line for people."""
    measured = measure(drafter, held_out)
    positions = shares(measured.by_position)
    return f"{measured.tokens_per_round:.3f} tokens/round | by position {positions}"


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
