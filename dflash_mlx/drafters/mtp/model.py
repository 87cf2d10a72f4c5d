"""A head for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2), and its drafts.

    x_i = W [norm(E(t_(i+1))) ; norm(h_i)],  y_i = layer(x_0 ... x_i),  p(t_(i+2)) = head(norm(y_i))

h_i is the target's state of a committed token; of a drafted one it is what the head made of the row
before. The layer is a decoder layer of the target's own kind, mlx-lm's module, so packed matrices,
partial rope, gates and experts come with it; see `kinds`. Rows are those of `networks/paired.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.core.config import MOST_ROWS
from dflash_mlx.drafters.mtp.kinds import Kind, kind_of
from dflash_mlx.drafters.networks.fields import Fields, flag
from dflash_mlx.drafters.networks.files import DraftConfig, Quantization, parameters_of, stored
from dflash_mlx.drafters.networks.layers import DraftNetwork
from dflash_mlx.drafters.networks.model import last_norm
from dflash_mlx.drafters.networks.paired import PairedModel
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.hooks import rotate_by_row, route
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache

OURS, SPLIT, INSIDE = "ours", "split", "inside"  # layouts: our folder, mlx-vlm's, a target's
_true = partial(flag, default=True)
_CHOOSES = "e_score_correction_bias"


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DraftConfig):
    """The config.json of a head in our words.

    Which variant a published head is comes from the program named beside the field's use in
    `kinds`; the usual values here are vLLM's of Qwen3-Next and Qwen3.5 (`qwen3_next_mtp.py`).
    """

    text: Fields = field(repr=False)  # the target's configuration
    # Whether the target's states are read behind its last norm, as its head reads them
    hidden_normed: bool = stored(_true, True)
    # Whether the state stands before the embedding in what is projected
    hidden_first: bool = stored(flag, False)
    # Whether the next step gets the state behind the head's own last norm
    feeds_normed: bool = stored(_true, True)
    layout: str = field(  # of its files
        default=OURS, compare=False, metadata={"read": lambda raw, name: raw.get(name, OURS)}
    )
    packed: Mapping[str, Quantization] = field(default_factory=dict)  # matrices, each by its name

    @property
    def kind(self) -> Kind:
        return kind_of(self.text)

    def layers_read(self, layers: int) -> tuple[int, ...]:
        return (layers - 1,)

    def problems(self) -> dict[str, Any]:
        return {**super().problems(), **self.block_problems(most=MOST_ROWS)}


class Network(DraftNetwork):
    """Its parameters have the names of the tensors in our folders, and in split ones of Qwen3.5."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        d, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(d, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(d, eps)
        self.fc = nn.Linear(2 * d, d, bias=False)
        self._kind = config.kind
        self.layers = self._kind.make_layers(config.text)
        self._hidden_first, self._feeds_normed = config.hidden_first, config.feeds_normed
        self._hidden_normed = config.hidden_normed
        self._last_norm: Callable[[mx.array], mx.array] | None = None  # the target's
        for module in self.modules():
            if isinstance(rope := module.get("rope"), nn.Module):
                rotate_by_row(rope)
        route(self)

    def set_dtype(self, dtype: mx.Dtype, *which: Any) -> None:
        """Cast all weights but those that choose experts, as mlx-lm does in targets."""
        kept = {n: a for n, a in parameters_of(self).items() if n.endswith(_CHOOSES)}
        super().set_dtype(dtype, *which)
        self.load_weights([*kept.items()], strict=False)

    def bind(self, target: Target) -> None:
        """Read this target's states from now on."""
        self._last_norm = last_norm(target) if self._hidden_normed else None

    def fuse(self, features: mx.array) -> mx.array:
        """States h [..., d] from the outputs of the target's last layer."""
        states = features if self._last_norm is None else self._last_norm(features)
        return states.astype(self.norm.weight.dtype)

    def pair(self, x: mx.array, h: mx.array) -> mx.array:
        """[..., d], the first layer's input of rows with embeddings x and states h."""
        embedding = self.pre_fc_norm_embedding(x.astype(h.dtype))
        hidden = self.pre_fc_norm_hidden(h)
        halves = [hidden, embedding] if self._hidden_first else [embedding, hidden]
        return self.fc(mx.concatenate(halves, axis=-1))

    def append(self, x: mx.array, h: mx.array, cache: SequenceCache) -> None:
        """Commit the rows with embeddings x and states h, [n, d] each, to `cache`."""
        cache.begin(Block(len(h)))
        self.remember(x[None], h[None], cache.layers[0])  # what is behind them nobody asks for
        cache.commit(range(len(h)))

    def remember(self, x: mx.array, h: mx.array, cache: LayerCache) -> None:
        """Write the first layer's keys and values of rows [B, n, d] into `cache`."""
        self._kind.remember(self.layers[0], self.pair(x, h), cache)

    def step(self, x: mx.array, h: mx.array, cache: SequenceCache) -> tuple[mx.array, mx.array]:
        own = cache.layers[0]
        final, states = self(x[None], h[None], self._kind.mask(len(x), own), own)
        return final[0], states[0]

    def __call__(
        self, x: mx.array, h: mx.array, mask: mx.array | str | None, cache: Any
    ) -> tuple[mx.array, mx.array]:
        """Final states of rows [B, n, d], and their h; `cache` is of the layers that keep one."""
        rows = self.pair(x, h)
        for layer in self.layers:
            rows = layer(rows, *((mask, cache) if self._kind.keeps(layer) else (None, None)))
        final = self.norm(rows)
        return final, final if self._feeds_normed else rows


class HeadModel(PairedModel):
    """A head bound to its target."""

    family = "mtp"
    scales_embeddings = False  # the norm behind them undoes any scale

    def __init__(self, network: Network, config: HeadConfig, target: Target) -> None:
        network.bind(target)
        super().__init__(network, config, target)
