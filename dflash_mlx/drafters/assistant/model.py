"""An assistant bound to its target: what it remembers of a sequence, and its drafts.

Each layer attends to keys and values of the target's last layer of its own kind that has some, full
or sliding, at the position of the newest token, in every step of a draft. So an assistant keeps
nothing of a text but the target's state, behind its last norm, of the last committed token. The h
of a drafted token is what the assistant made of the row before it.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.assistant.network import AssistantConfig, Network, OrderedHead, Seen
from dflash_mlx.drafters.formats import CHOOSE_ANOTHER
from dflash_mlx.drafters.networks.model import BoundModel, Draft, last_norm
from dflash_mlx.engine.state import Kind, State
from dflash_mlx.verifier.block import Block, Saved
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache

_TRIED = 8  # tokens that a draft is tried behind


class AssistantContext:
    """The target's state of the last committed token.

    Of earlier ones nothing is kept: wherever a sequence is cut, the last token left has to be taken
    in again, in the pass that reads what comes behind it.
    """

    def __init__(self, network: nn.Module, norm: Callable[[mx.array], mx.array]) -> None:
        self._network, self._norm = network, norm
        self._last: mx.array | None = None  # [1, D]
        self.length = 0

    @property
    def last(self) -> mx.array:
        """[1, D]."""
        if self._last is None:
            raise ValueError("the state of the last token is not known")
        return self._last

    @property
    def arrays(self) -> list[mx.array]:
        return [] if self._last is None else [self._last]

    def append(self, tokens: mx.array, features: mx.array | None) -> None:
        if features is None:
            raise ValueError("no features of tokens, though the drafter reads them")
        if len(features):
            self._last = self._norm(features[-1:])
            self.length += len(features)

    def refill_from(self, length: int) -> int:
        is_known = length == self.length and self._last is not None
        return length if is_known or length == 0 else length - 1

    def trim(self, length: int) -> None:
        if length != self.length:
            self.length, self._last = length, None

    @property
    def kind(self) -> Kind:
        return (self._network,), ()

    def fork(self) -> AssistantContext:
        return copy(self)

    def saved(self) -> Saved:
        return self.arrays, self.length

    def restore(self, saved: Saved, tokens: mx.array) -> None:
        arrays, self.length = saved
        self._last = arrays[0] if arrays else None


class AssistantModel(BoundModel[Any]):
    """An assistant's network bound to a target of Gemma 4.

    Raises DFlashError for a target without layers that it needs.
    """

    family = "assistant"

    def __init__(self, network: Network, config: AssistantConfig, target: Target) -> None:
        super().__init__(network, config, target)
        if config.centroids is not None:
            self.head = OrderedHead(network, config, target.kernels)
        owners = target.model.layers[: len(target.new_cache().layers)]
        kinds = {getattr(layer, "layer_type", ""): i for i, layer in enumerate(owners)}
        if missing := set(config.layer_types) - kinds.keys():
            what = f"the assistant reads a layer of {min(missing)}, and {target.name} has none"
            raise DFlashError(f"{what} with keys of its own", CHOOSE_ANOTHER)
        self._read = [kinds[kind] for kind in config.layer_types]  # the last of each kind
        self._norm = last_norm(target)

    def own_head(self, network: Network) -> Any:
        return network.model.embed_tokens.as_linear

    @property
    def scores_all(self) -> bool:
        return self.config.centroids is None

    def new_context(self) -> AssistantContext:
        return AssistantContext(self.module, self._norm)

    def tried(self, context: Any) -> mx.array:
        cache, tokens = self.target.new_cache(), mx.zeros(_TRIED, mx.int32)
        self.target.forward(tokens, cache, Block(_TRIED))
        cache.commit(range(_TRIED))
        return self.begin(State(cache, context)).logits(tokens[:1], [-1])

    def begin(self, state: State) -> AssistantDraft:
        return AssistantDraft(self, state)

    def seen(self, cache: SequenceCache) -> list[Seen]:
        """What each layer attends to of a target's cache."""
        found = {i: cache.layers[i].committed() for i in self._read}
        seen = []
        for i, window in zip(self._read, self.config.layer_windows, strict=True):
            keys, values = found[i]
            if window is not None:  # which counts the anchor as well
                keys, values = (each[:, :, 1 - window :] for each in (keys, values))
            seen.append(Seen(cache.layers[i], keys, values, cache.length))
        return seen


class AssistantDraft(Draft):
    """Keys and values are taken from the target's cache once for all steps."""

    def __init__(self, model: AssistantModel, state: State) -> None:
        super().__init__(model.head)
        self._network, self._embed = model.module, model.embed
        self._seen = model.seen(state.cache)
        self._states = state.context.last  # type: ignore[attr-defined]  # [1 + N, D]: h of all rows

    def states(self, tokens: mx.array, parents: list[int]) -> mx.array:
        h = self._states[mx.array(parents) + 1]
        final, states = self._network(self._embed(tokens), h, self._seen)
        self._states = mx.concatenate([self._states, states])
        return final  # type: ignore[no-any-return]
