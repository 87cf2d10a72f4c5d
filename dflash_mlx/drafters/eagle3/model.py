"""EAGLE-3 (arXiv 2503.01840, section 3): one decoder layer over pairs of inputs, and its drafts.

Of committed tokens h is made of the features of three layers, see `networks/paired.py`.

P-EAGLE (arXiv 2602.01469) has more layers, and all rows of its draft go through in one pass. Row 0
is EAGLE-3's: the anchor, and the state h of the last committed token. Every row behind it pairs the
mask token with the h that `fuse` makes of a learned vector in place of features, `mask_hidden`.
Rows see the context and the rows before them, and row i tells the token i + 1 behind the anchor,
whatever is before it. Read from speculators, SpecForge, NVIDIA's Automodel and vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.core.config import MOST_ROWS
from dflash_mlx.drafters.growth.grow import Ranked
from dflash_mlx.drafters.networks.fields import flag
from dflash_mlx.drafters.networks.files import DraftConfig, stored, too_large
from dflash_mlx.drafters.networks.layers import MLP, Attention, DraftNetwork
from dflash_mlx.drafters.networks.layers import Layer as DeeperLayer
from dflash_mlx.drafters.networks.model import BoundModel, Draft
from dflash_mlx.drafters.networks.paired import PairedContext, PairedModel
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.sequence import SequenceCache

USUAL_TAPS = 3


def usual_layers(layers: int) -> tuple[int, int, int]:
    """What is read of a target with so many layers where a file names none: low, middle, high.

    EAGLE-3 takes the states before layers 2, n // 2 and n - 3. Below seven layers these are not
    three, see `increase`.
    """
    return 1, layers // 2 - 1, layers - 4


def increase(aux_layers: Sequence[int]) -> bool:
    """Whether no layer is read twice or out of order."""
    return all(low < high for low, high in pairwise(aux_layers))


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DraftConfig):
    """The config.json of an EAGLE-3 drafter; without `aux_layers` it reads the usual ones."""

    target_hidden_size: int  # width of the features
    head_norms: bool = False  # of queries and keys, as in Qwen3
    norm_before_residual: bool = stored(flag, False)  # whether the layer adds to the normed h
    norm_before_fc: bool = stored(flag, False)  # whether features are normed all at once
    fc_norm: bool = stored(flag, False)  # ... layer by layer
    norm_output: bool = stored(flag, False)  # whether a drafted row's h is normed, too (EAGLE-3.1)
    # Of P-EAGLE: the token of rows behind the anchor's, and the shape of what they have in place of
    # features, [.., m*D]
    mask_token_id: int | None = None
    mask_hidden: tuple[int, ...] | None = None

    @property
    def target_width(self) -> int:
        return self.target_hidden_size

    @property
    def features(self) -> int:
        """Layers that it reads."""
        return USUAL_TAPS if self.aux_layers is None else len(self.aux_layers)

    def layers_read(self, layers: int) -> tuple[int, ...]:
        return usual_layers(layers) if self.aux_layers is None else self.aux_layers

    def unreadable(self, layers: int) -> str:
        in_order = increase(self.layers_read(layers))
        return super().unreadable(layers) or ("" if in_order else "and each is read once, in order")

    def problems(self) -> dict[str, Any]:
        width, features = self.hidden_size, self.target_hidden_size
        vocabulary, own = self.vocab_size, self.draft_vocab_size
        borrows = not (self.own_embedding and self.own_head)
        products = {
            f"{self.features} layers of target_hidden_size {features}": self.features * features,
            f"two inputs of hidden_size {width}": 2 * width,
        }
        return {
            **super().problems(),
            **self.block_problems(self.mask_token_id, most=MOST_ROWS),
            f"draft_vocab_size is {own}, more than the vocabulary of {vocabulary}":
                own is not None and own > vocabulary,
            f"draft_vocab_size is {own} of {vocabulary} tokens, but there is no lm_head for them":
                own is not None and not self.own_head,
            f"target_hidden_size is {features} and hidden_size {width}, but the drafter does not "
            "bring an embedding and a head of its own": borrows and features != width,
            "norm_before_fc and fc_norm are both true": self.norm_before_fc and self.fc_norm,
            **too_large(products),
        }  # fmt: skip


class Layer(nn.Module):
    """Pre-norm decoder layer whose queries, keys and values see two inputs side by side."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, 2 * d, config.head_norms)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(d, eps)
        self.hidden_norm = nn.RMSNorm(d, eps)
        self.post_attention_layernorm = nn.RMSNorm(d, eps)
        self._norm_before_residual = config.norm_before_residual

    def pair(self, x: mx.array, h: mx.array) -> mx.array:
        """[..., 2d], what attention sees of rows."""
        return mx.concatenate([self.input_layernorm(x), self.hidden_norm(h)], axis=-1)

    def __call__(
        self, x: mx.array, h: mx.array, mask: mx.array | str | None, cache: LayerCache
    ) -> mx.array:
        """[1, n, d] from rows with the embeddings x and the states h, [1, n, d] each."""
        residual = self.hidden_norm(h) if self._norm_before_residual else h
        y = residual + self.self_attn(self.pair(x, h), mask, cache)
        return y + self.mlp(self.post_attention_layernorm(y))


class Network(DraftNetwork):
    """Its parameters have the names of the tensors in a raw folder."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        d, width, eps = config.hidden_size, config.target_hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.features * width, d, bias=False)
        self.midlayer = Layer(config)
        self._norm_output = config.norm_output
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.features * width, eps)
        if config.mask_hidden is not None:
            self.mask_hidden = mx.zeros(config.mask_hidden)
        # P-EAGLE's layers, of Llama or Qwen3, are counted behind `midlayer`, so the first place is
        # empty
        more = [DeeperLayer(config, config.head_norms, True) for _ in config.layer_windows[1:]]
        self.layers = [nn.Module(), *more]
        if config.fc_norm:
            self.fc_norm = [nn.RMSNorm(width, eps) for _ in range(config.features)]

    def fuse(self, features: mx.array) -> mx.array:
        """States h [..., d] from the target's features [..., m*D]."""
        features = features.astype(self.norm.weight.dtype)
        if "input_norm" in self:
            features = self.input_norm(features)
        if "fc_norm" in self:
            parts = mx.split(features, len(self.fc_norm), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = mx.concatenate(normed, axis=-1)
        return self.fc(features)

    def append(self, x: mx.array, h: mx.array, cache: SequenceCache) -> None:
        """Commit the rows with embeddings x and states h, [n, d] each, to `cache`.

        Nobody asks what a committed row says of the next token: its keys and values are enough.
        """
        cache.begin(Block(len(h)))
        *before, last = cache.layers
        if before:
            y, layer = self._through(x, h, before), self.layers[len(before)]
            layer.self_attn.remember(layer.input_layernorm(y), last)
        else:
            self.remember(x[None], h[None], last)
        cache.commit(range(len(h)))

    def remember(self, x: mx.array, h: mx.array, cache: LayerCache) -> None:
        """Write the keys and values of rows [B, n, d] into `cache`."""
        self.midlayer.self_attn.remember(self.midlayer.pair(x.astype(h.dtype), h), cache)

    def __call__(
        self, x: mx.array, h: mx.array, mask: mx.array | str | None, cache: LayerCache
    ) -> tuple[mx.array, mx.array]:
        """Final states of rows, and their h for the rows behind them; all [..., n, d]."""
        return self._final(self.midlayer(x.astype(h.dtype), h, mask, cache))

    def step(self, x: mx.array, h: mx.array, cache: SequenceCache) -> tuple[mx.array, mx.array]:
        final, states = self._final(self._through(x, h, cache.layers))
        return final[0], states[0]

    def _through(self, x: mx.array, h: mx.array, caches: Sequence[LayerCache]) -> mx.array:
        """[1, n, d] behind the layers of these caches, from rows [n, d]."""
        first, *others = caches
        y = self.midlayer(x.astype(h.dtype)[None], h[None], first.make_mask(len(x)), first)
        for layer, cache in zip(self.layers[1:], others, strict=False):
            y = layer(y, cache.make_mask(len(x)), cache)
        return y

    def _final(self, y: mx.array) -> tuple[mx.array, mx.array]:
        final = self.norm(y)
        return final, final if self._norm_output else y


class EagleModel(PairedModel):
    """An EAGLE-3 or P-EAGLE network bound to its target."""

    family = "eagle3"
    scales_embeddings = False  # the norm behind them undoes any scale

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        if len(self.config.layer_windows) > 1:
            self.context = StackedContext

    @property
    def is_parallel(self) -> bool:
        return self.config.mask_token_id is not None

    @cached_property
    def _masked(self) -> mx.array:
        """H [1, d] of rows without features."""
        return self.module.fuse(self.module.mask_hidden.reshape(1, -1))  # type: ignore[no-any-return]

    def begin(self, state: State) -> Draft:
        if not self.is_parallel:
            return super().begin(state)
        context = cast(PairedContext, state.context)
        return ParallelDraft(self, context, partial(self.block, context))

    def tried(self, context: PairedContext) -> mx.array:
        if not self.is_parallel:
            return super().tried(context)
        return self.head.whole(self.block(context, mx.zeros(1, mx.int32)), context.words)

    def block(self, context: PairedContext, anchor: mx.array) -> mx.array:
        """P-EAGLE's final states [block_size - 1, d] of all rows behind an anchor [1]."""
        masks, cache = self.block_size - 2, context.cache
        tokens = mx.full(masks, self.config.mask_token_id, anchor.dtype)
        x = self.embed(mx.concatenate([anchor, tokens]))
        h = mx.concatenate([context.last, mx.repeat(self._masked, masks, axis=0)])
        cache.begin(Block(masks + 1))
        final, _ = self.module.step(x, h, cache)
        cache.discard()
        return final.astype(x.dtype)  # type: ignore[no-any-return]


class StackedContext(PairedContext):
    """Keys and values of later layers are made of what the layers before them saw."""

    def refill_from(self, length: int) -> int:
        return self.cache.nearest(length - 1) + 1 if length else 0


class ParallelDraft(Draft):
    """A draft of which the first row asks for all: what follows a row is known by its depth.

    block: final states [K, d] of all rows behind an anchor [1].
    """

    in_one_pass = True

    def __init__(
        self, model: BoundModel[Any], context: PairedContext, block: Callable[[mx.array], mx.array]
    ) -> None:
        super().__init__(model.head, context.words)
        self._block = block
        self._depths: list[int] = []
        self._states: mx.array | None = None  # [K, d] of all depths
        self._said: dict[str, Any] = {}  # of them, by what was asked for

    def states(self, tokens: mx.array, parents: list[int]) -> mx.array:
        whole, depths = self._ask("states", tokens, parents, lambda states, _: states)
        return whole[mx.array(depths)]  # type: ignore[no-any-return]

    def logits(self, tokens: mx.array, parents: list[int]) -> mx.array:
        whole, depths = self._ask("logits", tokens, parents, self._head.whole)
        return whole[mx.array(depths)]  # type: ignore[no-any-return]

    def likeliest(self, tokens: mx.array, parents: list[int]) -> mx.array:
        whole, depths = self._ask("likeliest", tokens, parents, self._head.likeliest)
        return whole[mx.array(depths)]  # type: ignore[no-any-return]

    def ranked(self, tokens: mx.array, parents: list[int], k: int) -> Ranked:
        whole, depths = self._ask("ranked", tokens, parents, partial(self._head.ranked, k=k))
        return Ranked(whole.tokens[depths], whole.logprobs[depths])

    def _ask(
        self, kind: str, tokens: mx.array, parents: list[int], say: Callable[..., Any]
    ) -> tuple[Any, list[int]]:
        """What `say` has to say of all depths, and how deep the next rows are."""
        depths = [self._depths[parent] + 1 if parent >= 0 else 0 for parent in parents]
        self._depths += depths
        if self._states is None:  # the first row, whose token is the anchor
            self._states = self._block(tokens)
        if kind not in self._said:
            self._said[kind] = say(self._states, self._words)
        return self._said[kind], depths
