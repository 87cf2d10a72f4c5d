"""Who wrote a state: whether another can go on with it, in this process and in the next one."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.state import State
from dflash_mlx.system.machine import model_key
from dflash_mlx.verifier.model import Target

_FORMAT = 2  # of what states save; another number makes files of before useless


@dataclass(frozen=True)
class CacheKey:
    """What wrote a state; one can go on with another's where the two are equal.

    aux_layers: target layers that the drafter's context was told of. settings: of all caches.
    networks: of the context. same: their ids, since modules are dictionaries and compare by their
    weights; whoever keeps a key keeps the networks, so no other network gets these ids.
    """

    target: Target
    aux_layers: tuple[int, ...]
    settings: Hashable
    networks: tuple[nn.Module, ...] = field(compare=False)
    same: tuple[int, ...]

    @classmethod
    def of(cls, target: Target, drafter: Drafter, state: State) -> CacheKey:
        """Of a state that these two write."""
        networks, settings = state.context.kind
        kinds = state.cache.kind, settings
        return cls(target, drafter.aux_layers, kinds, networks, tuple(map(id, networks)))

    def fingerprint(self) -> str:
        """The same in another process only for the same weights, settings, machine and versions."""
        target = self.target
        parameters = target.parameters()
        return model_key(
            target.name,
            parameters,
            _FORMAT,
            weights_digest(parameters),
            type(target.model).__module__,
            getattr(target.model, "args", None),  # what is in no weight, such as scales of rope
            self.aux_layers,
            self.settings,
            [weights_digest(_named(network)) for network in self.networks],
        )


def _named(network: nn.Module) -> list[tuple[str, mx.array]]:
    return tree_flatten(network.parameters())  # type: ignore[return-value]


def weights_digest(parameters: Iterable[tuple[str, mx.array]]) -> str:
    """Of names and of all numbers: the sums of each matrix' rows and columns, bit by bit.

    Reads the weights twice, which takes as long as two tokens of plain decoding.
    """
    digest, sums = hashlib.sha256(), []
    for name, array in parameters:
        matrix = array.reshape(-1, array.shape[-1] if array.ndim else 1)
        wide = matrix.shape[1] * matrix.itemsize % 4 == 0
        bits = matrix.view(mx.uint32 if wide else mx.uint8).astype(mx.uint32)
        sums += [bits.sum(axis=0), bits.sum(axis=1)]
        digest.update(f"{name} {array.shape} {array.dtype} ".encode())
    mx.eval(sums)
    for part in sums:
        digest.update(np.array(part).tobytes())
    return digest.hexdigest()
