"""Keys and values of committed tokens, and of the block under verification behind them.

One cache serves full attention and sliding windows. Slots are contiguous and in order of
position; the block's rows are written in place after the committed ones and either committed
(a path of them) or discarded. `LayerCache` answers the calls that mlx-lm's attention layers and
mask helpers make of a cache: `offset`, `make_mask` and `update_and_fetch`; it also attends, since
it knows what a mask stands for and a kernel does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system import cpu_math
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.routing import Kernels
from dflash_mlx.verifier.saved import Saved
from kernels_metal.cache_commit import CACHE_COMMIT, accepted_rows_reference, cache_commit
from kernels_metal.cascade_attention import CASCADE_ATTENTION, AttentionPlan, Packed
from kernels_metal.visibility import Visibility

STEP = 256  # slots are allocated in multiples of this, as mlx-lm does
_NO_ROWS = Block(0)
_GROUPS = (64, 32)  # numbers of quantised keys or values that share a scale and a bias
SLACK = 64  # positions kept behind a window, so that the last rounds can be taken back


class LayerCache:
    """Keys and values of one attention layer, [1, heads, slots, dim] each.

    window: how many positions a query sees, itself included; None for all of them. kernels: of the
    model whose keys and values these are; None for stock MLX. kv_bits: what they are quantised to,
    4 or 8, the block's rows included; attention sees what is stored.
    """

    def __init__(
        self,
        window: int | None = None,
        kernels: Kernels | None = None,
        kv_bits: int | None = None,
    ) -> None:
        self.window = window
        self.kernels = kernels
        self.kv_bits = kv_bits
        self.length = 0
        self.offset: int | mx.array = 0  # of the block: its first row, or each row
        self.block = Block(0)
        self._start = 0
        self._asks_kernels = False
        # Quantised keys and values of the pass: unpacked, and as they are stored
        self._latest: tuple[mx.array, mx.array, Packed, Packed] | None = None
        self._stored: list[mx.array] = []  # of the keys, then as many of the values

    @property
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for this cache to be up to date."""
        return list(self._stored)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(stored.nbytes for stored in self._stored)

    @property
    def places(self) -> mx.array:
        """The position of each row of the pass, see `Block.places`."""
        return self.block.places(self.length)

    @property
    def _end(self) -> int:
        """Where the pass's rows go: behind the committed ones, and those of passes before it."""
        return self.length + self.block.before

    @property
    def _first(self) -> int:
        """Oldest committed position that the block's first row sees."""
        if self.window is None:
            return self._start
        return max(self._start, self._oldest(self.length))

    def begin(self, block: Block, asks_kernels: bool = False) -> None:
        """Announce the rows of the next pass. asks_kernels: whether a kernel could run."""
        self.block, self.offset = block, block.positions(self.length)
        self._asks_kernels = asks_kernels and block.fits_kernels

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the block's rows after the committed ones; return all that its rows may see."""
        rows, bits = keys.shape[2], self.kv_bits
        self._latest = None  # views, behind which the cache would be copied to be written to
        parts = [keys, values] if bits is None else [*pack(keys, bits), *pack(values, bits)]
        self._reserve(rows, parts)
        at, first = self._end - self._start, self._first - self._start
        end = at + rows
        for stored, part in zip(self._stored, parts, strict=True):
            stored[:, :, at:end] = part  # MLX takes longer to read an index with an ellipsis
        return self._seen(slice(first, end))

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` returned in this pass, for layers that share it."""
        first = self._first - self._start
        return self._seen(slice(first, self._end - self._start + self.block.rows))

    def _seen(self, places: slice) -> tuple[mx.array, mx.array]:
        seen, bits = [stored[:, :, places] for stored in self._stored], self.kv_bits
        if bits is None:
            return seen[0], seen[1]
        keys, values = unpack(seen[:3], bits), unpack(seen[3:], bits)
        if self._asks_kernels:
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
            if rows == 1 and self.block.visible.all():
                return None
            if self.block.is_run and not return_array:
                return "causal"
        return self.attention_mask(self.block.visible, window)

    def attention_mask(self, visible: npt.NDArray[np.bool_], window: int | None) -> mx.array:
        """Bool [rows, visible + rows]: the committed positions, then the block's own rows.

        visible: [rows, before + rows] which rows of the block each row sees. The window counts from
        each row's own position.
        """
        prefix, depths = self.length - self._first, self.block.depths
        first = np.zeros_like(depths)
        if window is not None:
            first = np.clip(prefix + depths - window + 1, 0, prefix)
            visible = visible & (self.block.all_depths > depths[:, None] - window)
        before = mx.arange(prefix) >= mx.array(first)[:, None]
        mask = mx.concatenate([before, mx.array(visible)], axis=1)
        if self._asks_kernels:
            self.block.remember(mask, Visibility(prefix, visible, tuple(first.tolist())))
        return mask

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

        queries: [1, heads, rows, D]. mask: from `make_mask` or `attention_mask`, or any that MLX's
        own attention takes, which then computes it.
        """
        kernels = self.kernels
        if self._asks_kernels and kernels is not None and queries.shape[2] == self.block.rows:
            seen = self.block.seen(mask, keys.shape[2])
            if seen is None:
                kernels.note(CASCADE_ATTENTION.name, "some layers make masks of their own")
            elif (
                out := self._through(kernels, seen, queries, keys, values, scale, sinks)
            ) is not None:
                return out
        if cpu_math.pays(queries.shape[1] * queries.shape[2] * keys.shape[2]):
            attend = partial(cpu_math.attention, scale=scale, mask=mask, sinks=sinks)
            return attend(queries, keys, values)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )

    def _through(  # noqa: PLR0913  # those of attention
        self,
        kernels: Kernels,
        seen: Visibility,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """What the kernel gives, if it is chosen; the layers of a pass share the choice.

        Quantised keys and values it reads as they are stored, and what was unpacked of them for
        stock MLX is never computed.
        """
        given: tuple[Any, ...] = (queries, keys, values)
        latest = self._latest
        if latest is not None and keys is latest[0] and values is latest[1]:
            given = queries, *latest[2:]
        shapes = queries.shape, queries.dtype, keys.shape, values.shape
        key = id(kernels.running()), *shapes, given[1] is keys, scale, sinks is None
        try:
            plan = seen.plans[key]
        except KeyError:
            choice = kernels.chosen(CASCADE_ATTENTION, (*given, seen, scale, sinks))
            way = choice and choice.way or "once"
            plan = choice and AttentionPlan(queries, given[1], seen, scale, way)
            seen.plans[key] = plan
        return None if plan is None else plan(*given, sinks)

    def lengthen(self, rows: int) -> None:
        """Commit `rows` more positions that are all like the last one, to time long contexts."""
        at = self.length - self._start
        more = [mx.repeat(stored[..., at - 1 : at, :], rows, axis=2) for stored in self._stored]
        self._reserve(rows, more)
        at = self.length - self._start
        for stored, part in zip(self._stored, more, strict=True):
            stored[..., at : at + rows, :] = part
        self.length += rows

    def discard(self) -> None:
        """Drop the block's rows."""
        self.block, self._latest = _NO_ROWS, None

    def can_trim(self, length: int) -> bool:
        """Whether the positions that a query at `length` sees are still stored."""
        return length == 0 or self._oldest(length) >= self._start

    def refill_from(self, length: int) -> int:
        """The position to go back to, so that rows from there to `length` make good what is gone.

        `length` itself where `can_trim`.
        """
        return length if self.can_trim(length) else self._oldest(length)

    def trim(self, length: int) -> None:
        """Forget the committed positions from `length` on, and all where not `can_trim`."""
        if not self.can_trim(length):
            self._start = length
        self.length = min(self.length, length)
        self._start = min(self._start, self.length)
        self._give_back()
        self.discard()

    def fork(self) -> LayerCache:
        """A copy that goes on by itself; storage is shared until either of them writes."""
        other = copy(self)
        other._stored = [mx.array(stored) for stored in self._stored]
        return other

    def saved(self) -> Saved:
        """The committed rows."""
        rows = slice(0, self.length - self._start)
        return [stored[..., rows, :] for stored in self._stored], [self._start, self.length]

    def restore(self, saved: Saved) -> None:
        """Hold what a cache of the same kind has saved."""
        self._stored, (self._start, self.length) = saved

    def _oldest(self, length: int) -> int:
        """The oldest position that a query at `length` sees."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def _give_back(self) -> None:
        """Give up slots, where at least half of them are no longer needed."""
        slots = -(-(self.length - self._start) // STEP) * STEP
        if self._stored and 2 * slots <= self._stored[0].shape[2]:
            kept = [mx.contiguous(stored[..., :slots, :]) for stored in self._stored]
            self._stored = kept if slots else []

    def _reserve(self, rows: int, parts: Sequence[mx.array]) -> None:
        """Make room for `rows` more; slots that no window reaches any more are given up."""
        if not self._stored:
            self._stored = [_empty(rows, part) for part in parts]
            return
        if self._end - self._start + rows <= self._stored[0].shape[2]:
            return
        start = max(self._start, self._first - SLACK) if self.window is not None else 0
        kept = slice(start - self._start, self._end - self._start)
        self._start = start
        self._stored = [
            mx.concatenate([stored[..., kept, :], _empty(rows, part)], axis=2)
            for stored, part in zip(self._stored, parts, strict=True)
        ]


def commit_layers(layers: Sequence[LayerCache], path: Sequence[int]) -> None:
    """Keep the rows in `path`, which increases, at consecutive slots of all layers; no others."""
    for layer in layers:
        layer._latest = None
    arrays = [array for layer in layers for array in layer._stored]
    first = [layer.length - layer._start for layer in layers for _ in layer._stored]
    kernels = layers[0].kernels
    if kernels is not None and kernels.active and layers[0].kv_bits is not None:
        kernels.note(CACHE_COMMIT.name, "keys and values are quantised")
        kernels = None

    def accepted_rows(*given: Any) -> list[mx.array]:
        rows = None if kernels is None else kernels.run(CACHE_COMMIT, *given)
        return accepted_rows_reference(*given) if rows is None else rows

    cache_commit(arrays, path, first, accepted_rows)
    for layer in layers:
        layer.length += len(path)
        layer.block = _NO_ROWS


def _empty(rows: int, like: mx.array) -> mx.array:
    """Zeroed slots for at least `rows` more rows of the shape and type of `like`."""
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
    raise DFlashError(
        f"keys or values of this model are {width} numbers wide, which is no multiple of "
        f"{_GROUPS[-1]}, so they cannot be quantised",
        "leave out --kv-bits",
    )


def unpack(stored: Sequence[mx.array], bits: int) -> mx.array:
    """The rows [1, heads, n, D] that `stored`, of `pack` with the same `bits`, stands for."""
    packed, scales, biases = stored
    groups = scales.shape[-1]
    width = packed.shape[-1] * 32 // bits
    return mx.dequantize(packed, scales, biases, group_size=width // groups, bits=bits)
