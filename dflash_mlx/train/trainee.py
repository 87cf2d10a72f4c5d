"""A drafter in training, of any family, over many blocks at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import mlx.core as mx
import numpy as np

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.networks.head import capped
from dflash_mlx.drafters.networks.tensors import parameters_of, save_network
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train.blocks import Array, Blocks
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.data import Texts
from dflash_mlx.train.features import hidden_width, vocabulary_size
from dflash_mlx.verifier.model import Target

_NOISE = 0.02  # standard deviation of fresh weights
_Trainee = TypeVar("_Trainee", bound="Trainee")


@dataclass(frozen=True)
class Trainee(ABC):
    """A network in float32 with its configuration, and the target that it is to draft for.

    It borrows the target's embedding and head. raw: its config.json. files: of its family, see
    `FileFormat`.
    """

    network: Any
    config: Any
    raw: dict[str, Any]
    target: Target
    files: ClassVar[Any]

    @classmethod
    @abstractmethod
    def new(cls: type[_Trainee], config: TrainConfig, pair: Pair) -> _Trainee:
        """A drafter that a run starts from, where no other is named."""

    @classmethod
    def of(cls: type[_Trainee], raw: dict[str, Any], target: Target) -> _Trainee:
        """What a config.json describes, with weights that mean nothing yet."""
        config = cls.files.parse_config(raw, "the drafter")
        return cls(cls.files.build(config, "the drafter"), config, raw, target)

    @classmethod
    def fresh(cls: type[_Trainee], raw: dict[str, Any], target: Target, seed: int) -> _Trainee:
        """What a config.json describes, with norms at one and small noise everywhere else."""
        new, noise, weights = cls.of(raw, target), mx.random.key(seed), []
        for name, array in parameters_of(new.network).items():
            noise, key = mx.random.split(noise)
            weight = mx.random.normal(array.shape, key=key) * _NOISE
            weights.append((name, mx.ones(array.shape) if array.ndim == 1 else weight))
        new.network.load_weights(weights)
        mx.eval(new.network.parameters())
        return new

    @classmethod
    def read(cls: type[_Trainee], folder: Path, target: Target) -> _Trainee:
        """An existing drafter.

        Raises DFlashError for one that does not fit the target, or cannot be trained here.
        """
        drafter = cls.files.read_drafter(folder)
        sizes = {"hidden_size": hidden_width(target), "vocab_size": vocabulary_size(target)}
        facts = {**sizes, "num_hidden_layers": target.num_layers}
        for misfit in cls.files.misfits(drafter.config, facts, target.name, str(folder)):
            raise DFlashError(misfit.what, misfit.next_step)
        cls.check_trainable(folder, drafter.config)
        network = drafter.network()
        network.set_dtype(mx.float32)
        mx.eval(network.parameters())
        return cls(network, drafter.config, drafter.raw, target)

    @classmethod
    def check_trainable(cls, folder: Path, config: Any) -> None:
        """Raise DFlashError for a drafter that cannot be trained here."""
        if config.quantization is not None:
            raise DFlashError(f"{folder} holds a quantised drafter", "choose one in full precision")

    def prepared(self: _Trainee, mode: str, block_size: int | None = None) -> _Trainee:
        """The same, to be trained in this mode, in blocks of this size if one is given."""
        if block_size is None:
            return self
        config = replace(self.config, block_size=block_size)
        return replace(self, config=config, raw={**self.raw, "block_size": block_size})

    def save(self, folder: Path) -> None:
        """Write a drafter folder; OSError where the disk is full."""
        save_network(folder, self.network, self.raw)

    @abstractmethod
    def inputs(self, texts: Texts, blocks: Blocks) -> tuple[mx.array, ...]:
        """What `states` takes for these blocks."""

    @abstractmethod
    def states(self, *inputs: mx.array) -> mx.array:
        """Final states [S, A, B, d]: [..., i, :] tells what is at position i of a block.

        Position 0 holds the anchor, and what is there means nothing.
        """

    def logits(self, states: mx.array) -> mx.array:
        """[..., V] from final states [..., d]."""
        return capped(self.target.head()(states * self.multiplier), self.softcap)

    def drafts(self, states: mx.array, before: Array) -> Array:
        """[S, A, n] greedy tokens from final states [S, A, n, d]; before: those that precede."""
        return np.array(mx.argmax(self.logits(states), axis=-1))

    @property
    def softcap(self) -> float | None:
        """Of the logits, None for none."""
        return None

    @property
    def multiplier(self) -> float:
        """What final states are multiplied by before the head."""
        return 1.0
