"""Keys and values of committed tokens, and of the block under verification behind them.

One cache serves full attention and sliding windows. Slots are contiguous and in order of
position; the block's rows are written in place after the committed ones and either committed
(a path of them) or discarded. `LayerCache` answers the calls that mlx-lm's attention layers and
mask helpers make of a cache: `offset`, `make_mask` and `update_and_fetch`; it also attends, by a
kernel where that is chosen, which reads what a mask means instead of its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system import cpu_math
from dflash_mlx.verifier.block import Block, Cache, Forest, JoinedMask, Mask, Saved
from dflash_mlx.verifier.routing import Kernels, Plans
from kernels_metal.cascade_attention import CASCADE_ATTENTION, AttentionPlan, Packed

STEP = 256  # slots are allocated in multiples of this, as mlx-lm does
SLACK = 64  # positions kept behind a window, so that the last rounds can be taken back
_NO_ROWS = Block(0)
_GROUPS = (64, 32)  # numbers of quantised keys or values that share a scale and a bias

Attended = tuple[mx.array, mx.array | Packed, mx.array | Packed]  # queries, keys and values


class LayerCache(Cache):
    """Keys and values of one attention layer, [1, heads, slots, dim] each."""

    def __init__(
        self,
        window: int | None = None,
        kernels: Kernels | None = None,
        kv_bits: int | None = None,
    ) -> None:
        self.window = window  # positions that a query sees, itself included; None for all
        self.kernels = kernels  # of the model that writes here; None for stock MLX
        self.kv_bits = kv_bits  # 4 or 8 where what is stored is quantised, the block's rows too
        self.kind = window, kv_bits
        self.length = 0
        self.offset: int | mx.array = 0  # of the block: its first row, or each row
        self.block = _NO_ROWS
        self._start = 0  # the position in the first slot
        self._plans: Plans | None = None  # of this pass, where kernels could run
        # Quantised keys and values of the pass: unpacked, and as they are stored
        self._latest: tuple[mx.array, mx.array, Packed, Packed] | None = None
        self._stored: list[mx.array] = []  # of the keys, then as many of the values

    @property
    def attends(self) -> bool:
        return self.kernels is not None and self.kernels.mode != "off"

    @property
    def arrays(self) -> list[mx.array]:
        return list(self._stored)

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self._stored)

    @property
    def places(self) -> mx.array:
        return self.block.places(self.length)

    @property
    def slots(self) -> int:
        """How many of them are taken by committed rows."""
        return self.length - self._start

    @property
    def _end(self) -> int:
        """The slot of the pass's first row, behind those of passes before it."""
        return self.length - self._start + self.block.before

    @property
    def _first(self) -> int:
        """The slot of the oldest committed position that the block's first row sees."""
        return 0 if self.window is None else max(0, self._oldest(self.length) - self._start)

    def begin(self, block: Block, plans: Plans | None = None) -> None:
        self.block, self.offset, self._plans = block, block.positions(self.length), plans

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the block's rows after the committed ones; return all that its rows may see."""
        rows, bits = keys.shape[2], self.kv_bits
        self._latest = None  # views, behind which the cache would be copied to be written to
        parts = [keys, values] if bits is None else [*pack(keys, bits), *pack(values, bits)]
        end = self._write(rows, parts)
        return self._seen(slice(self._first, end))

    def _write(self, rows: int, parts: Sequence[mx.array]) -> int:
        """Behind all that is there; the slot behind them."""
        end = self._end + rows
        if not self._stored or end > self._stored[0].shape[2]:
            self._reserve(rows, parts)
            end = self._end + rows
        at = end - rows
        for stored, part in zip(self._stored, parts, strict=True):
            stored[:, :, at:end] = part  # MLX takes longer to read an index with an ellipsis
        return end

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` returned in this pass, for layers that share it."""
        return self._seen(slice(self._first, self._end + self.block.rows))

    def committed(self) -> tuple[mx.array, mx.array]:
        """Keys and values [1, heads, n, D] of the committed tokens that the next one sees."""
        return self._seen(slice(self._first, self.slots))

    def _seen(self, places: slice) -> tuple[mx.array, mx.array]:
        seen, bits = [stored[:, :, places] for stored in self._stored], self.kv_bits
        if bits is None:
            return seen[0], seen[1]
        keys, values = unpack(seen[:3], bits), unpack(seen[3:], bits)
        if self._plans is not None:
            self._latest = keys, values, Packed(*seen[:3]), Packed(*seen[3:])
        return keys, values

    def make_mask(
        self, rows: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask mlx-lm asks for: None, "causal", or bool [rows, visible + rows].

        A cache with a window holds no more, whatever larger one a model asks for (as plamo3 does):
        in passes of one row its layers see just that.
        """
        window = min(filter(None, (window_size, self.window)), default=None)
        if window is None or self._end - self._first + rows <= window:
            if rows == 1 and (self.block.is_run or self.block.visible.all()):
                return None
            if self.block.is_run and not return_array:
                return "causal"
        return self._mask(self.block.visible, window)

    def block_mask(self, text: int = 0) -> mx.array | None:
        """What rows of a draft see, None for all; the first `text` rows see nothing behind them."""
        block, window = self.block, self.window
        if window is None and not text and block.is_run:
            return None
        apart = block.depths[:, None] - block.depths
        inside = (apart >= 0) | (block.depths[:, None] >= text)
        if window is not None:
            inside &= np.abs(apart) < window
        return self._mask(inside & block.same_branch, window)

    def _mask(self, visible: npt.NDArray[np.bool_], window: int | None) -> mx.array:
        prefix = self.slots - self._first
        return self.block.mask(visible, prefix, window, self._plans is not None)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention of the block's rows to what `update_and_fetch` returned.

        queries: [1, heads, rows, D]. mask: from `make_mask` or `block_mask`, or any that MLX's
        own attention takes, which then computes it.
        """
        if self._plans is not None and queries.shape[2] == self.block.rows:
            given: Attended = queries, keys, values
            latest = self._latest
            if latest is not None and keys is latest[0] and values is latest[1]:
                given = queries, *latest[2:]  # what was unpacked is then never computed
            plan = self._plan(self._plans, given, keys.shape, scale, mask, sinks)
            if plan is not None:
                return plan(*given, sinks)
        exponentials = queries.shape[1] * queries.shape[2] * keys.shape[2]
        if exponentials >= cpu_math.ENOUGH and cpu_math.applies():
            return cpu_math.attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )

    def extend_and_attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
    ) -> mx.array:
        """`update_and_fetch` and `attend` as one, which looks a plan up once for alike layers."""
        plans, bits = self._plans, self.kv_bits
        alike = self.window, scale, id(mask)
        known = None if plans is None or bits is not None else plans.shared.get(alike)
        if known is not None and known[1] is not None and self._first == 0:
            self._write(queries.shape[2], (keys, values))
            return known[1](queries, *self._stored, None)  # type: ignore[no-any-return]
        seen = self.update_and_fetch(keys, values)
        found = self.attend(queries, *seen, scale=scale, mask=mask)
        if plans is not None and bits is None and known is None:
            plan = self._plan(plans, (queries, *seen), seen[0].shape, scale, mask, None)
            plans.shared[alike] = mask, plan  # and the mask, so that no other gets its id
        return found

    def _plan(  # noqa: PLR0913  # those of attention
        self, plans: Plans, given: Attended, shape: Any, scale: float, mask: Any, sinks: Any
    ) -> AttentionPlan | None:
        """The kernel's, if it is chosen; the layers of a pass share the choice."""
        if isinstance(mask, mx.array) and not isinstance(mask, Mask):
            plans.kernels.note(CASCADE_ATTENTION.name, "some layers make masks of their own")
            return None
        meaning = mask.seen if isinstance(mask, Mask) else mask

        def settle() -> AttentionPlan | None:
            seen = self.block.seen(meaning, shape[2])
            choice = plans.kernels.chosen(CASCADE_ATTENTION, (*given, seen, scale, sinks))
            if choice is None:
                return None
            return AttentionPlan(given[0], given[1], seen, scale, choice.way or "once")

        is_stored = isinstance(given[1], Packed)
        key = meaning, given[0].shape, given[0].dtype, shape, is_stored, scale, sinks is None
        return plans.find(key, settle)

    def joined(self, layers: Sequence[LayerCache], forest: Forest) -> JoinedLayer:
        return JoinedLayer(layers, forest)

    def nearest(self, length: int) -> int:
        oldest = self._oldest(length)
        return length if length == 0 or oldest >= self._start else oldest

    def rewind(self, length: int) -> int:
        if length and self._oldest(length) < self._start:
            self._start = length
        self.length = min(self.length, length)
        self._start = min(self._start, self.length)
        slots = -(-self.slots // STEP) * STEP
        if self._stored and 2 * slots <= self._stored[0].shape[2]:  # half of them not needed
            kept = [mx.contiguous(stored[..., :slots, :]) for stored in self._stored]
            self._stored = kept if slots else []
        self.discard()
        return self.length

    def commit(self, path: Sequence[int]) -> None:
        raise NotImplementedError("all layers of a sequence commit together, see `KeyValues`")

    def discard(self) -> None:
        self.block, self._latest, self._plans = _NO_ROWS, None, None

    def fork(self) -> LayerCache:
        other = copy(self)
        other._stored = [mx.array(stored) for stored in self._stored]
        return other

    def saved(self) -> Saved:
        return [stored[:, :, : self.slots] for stored in self._stored], [self._start, self.length]

    def restore(self, saved: Saved) -> None:
        self._stored, (self._start, self.length) = saved

    def lengthen(self, rows: int) -> None:
        last = slice(self.slots - 1, self.slots)
        more = [mx.repeat(stored[:, :, last], rows, axis=2) for stored in self._stored]
        self._write(rows, more)
        self.length += rows

    def _oldest(self, length: int) -> int:
        return 0 if self.window is None else max(0, length - self.window + 1)

    def _reserve(self, rows: int, parts: Sequence[mx.array]) -> None:
        """Make room for `rows` more; slots that no window reaches any more are given up."""
        if not self._stored:
            self._stored = [_empty(rows, part) for part in parts]
            return
        first = max(0, self._first - SLACK) if self.window is not None else 0
        kept = slice(first, self._end)
        self._start += first
        self._stored = [
            mx.concatenate([stored[:, :, kept], _empty(rows, part)], axis=2)
            for stored, part in zip(self._stored, parts, strict=True)
        ]


class JoinedLayer:
    """The caches of one attention layer of several sequences, in the place of one."""

    attends = True

    def __init__(self, parts: Sequence[LayerCache], forest: Forest) -> None:
        self.parts, self.window, self._forest = parts, parts[0].window, forest
        self.offset, self.places = forest.positions, forest.places
        self._seen: list[tuple[mx.array, mx.array]] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Hand each sequence its rows; what each sees of them and before waits for `attend`."""
        both = (self._forest.split(rows, axis=-2) for rows in (keys, values))
        pairs = zip(self.parts, *both, strict=True)
        self._seen = [layer.update_and_fetch(*rows) for layer, *rows in pairs]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.parts[0].keys_and_values()

    def extend_and_attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
    ) -> mx.array:
        seen = self.update_and_fetch(keys, values)
        return self.attend(queries, *seen, scale=scale, mask=mask)

    def make_mask(self, rows: int, *window_and_array: Any, **named: Any) -> JoinedMask:
        masks = (part.make_mask(part.block.rows, *window_and_array, **named) for part in self.parts)
        return JoinedMask(list(masks))

    def block_mask(self) -> JoinedMask:
        return JoinedMask([part.block_mask() for part in self.parts])

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, mask: Any = None, **how: Any
    ) -> mx.array:
        """Attention of each sequence's rows; TypeError for a mask that is not `make_mask`'s own."""
        if mask is not None and not isinstance(mask, JoinedMask):
            raise TypeError("this model makes or changes masks")
        masks = [None] * len(self.parts) if mask is None else mask.of_each
        parts = self._forest.split(queries, axis=-2)
        of_each = zip(self.parts, parts, self._seen, masks, strict=True)
        found = [layer.attend(part, *seen, mask=own, **how) for layer, part, seen, own in of_each]
        return mx.concatenate(found, axis=-2)


def _empty(rows: int, like: mx.array) -> mx.array:
    slots = -(-rows // STEP) * STEP
    return mx.zeros((*like.shape[:2], slots, like.shape[3]), like.dtype)


def pack(rows: mx.array, bits: int) -> list[mx.array]:
    """MLX's affine triple of `rows` [1, heads, n, D]: arrays of the same first three dimensions.

    Every row of every head is quantised by itself, so what is stored of it is the same in passes
    of any width, and moving it to another slot is exact. bits: 4 or 8. Raises DFlashError for a D
    that no group size divides.
    """
    width = rows.shape[-1]
    for size in _GROUPS:
        if width % size == 0:
            return list(mx.quantize(rows, group_size=size, bits=bits))
    what = f"keys or values of this model are {width} numbers wide, which is no multiple of "
    what += f"{_GROUPS[-1]}, so they cannot be quantised"
    raise DFlashError(what, "leave out --kv-bits")


def unpack(stored: Sequence[mx.array], bits: int) -> mx.array:
    """The rows [1, heads, n, D] that `stored`, of `pack` with the same `bits`, stands for."""
    packed, scales, biases = stored
    groups = scales.shape[-1]
    width = packed.shape[-1] * 32 // bits
    return mx.dequantize(packed, scales, biases, group_size=width // groups, bits=bits)
