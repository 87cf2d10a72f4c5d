"""Everything that one conversation remembers between rounds and between turns."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy.typing as npt

from dflash_mlx.core.prompt import Piece, Prompt, shared_length
from dflash_mlx.core.tree import Accepted, rows_on
from dflash_mlx.engine.grammar import Constraint
from dflash_mlx.verifier.block import Saved, join, split
from dflash_mlx.verifier.sequence import SequenceCache

Kind = tuple[tuple[nn.Module, ...], Hashable]  # networks, and settings of what they keep


class Earlier(Protocol):
    """The texts of other conversations that drafts of this one may come from."""

    def find(self, suffix: npt.NDArray[Any]) -> list[Any]: ...
    def add(self, tokens: Sequence[int]) -> None: ...


class Context(Protocol):
    """What a drafter remembers of one sequence's committed tokens."""

    @property
    def length(self) -> int:
        """Committed tokens it holds."""

    @property
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for it to be up to date."""

    def append(self, tokens: mx.array, features: mx.array | None) -> None:
        """Take in the next n committed tokens [n] and their auxiliary hidden states.

        features: [n, m*d], None for a drafter that reads none. Either may be unevaluated.
        """

    def refill_from(self, length: int) -> int:
        """From where on tokens have to be taken in again for drafts behind `length` tokens."""

    def trim(self, length: int) -> None:
        """Forget the tokens from `length` on."""

    @property
    def kind(self) -> Kind:
        """What another has to have in common with it, to go on with what it holds."""

    def fork(self) -> Context:
        """A copy that goes on by itself; storage is shared until either of them writes."""

    def saved(self) -> Saved:
        """All that it holds, but the tokens."""

    def restore(self, saved: Saved, tokens: mx.array) -> None:
        """Hold what one of the same kind has saved of `tokens` [n]; it was empty until now."""


class State:
    """The committed tokens' caches, and the anchor: the newest token, not in any cache yet."""

    def __init__(self, cache: SequenceCache, context: Context) -> None:
        self.cache = cache  # the target's
        self.context = context  # the drafter's
        self.anchor = mx.array([], dtype=mx.int32)  # [1], may be unevaluated; [0] in a prompt
        self.opening = self.anchor  # logits [1, V] after the prompt
        self.last: Accepted | None = None  # of the newest tree of a drafter in this answer
        self.end = 0  # the position at which the answer ends at the latest
        # Seconds that drafters have nothing to do with: whoever reads the answer was waited for,
        # or a grammar left no choice.
        self.paused = 0.0
        # Whether all that the next pass begins from is computed: one that fails can be done again
        self.settled = True
        self.delayed = False  # whether the last pass had more rows of others than was known
        self.beside = 0  # rows that the next pass has for sequences of other drafters
        self.constraint: Constraint | None = None  # what this answer may be, None for anything
        self.earlier: Earlier | None = None  # what others said, where drafts may come from that
        self.pieces: tuple[Piece, ...] = ()  # of the committed prompt
        self._tokens: list[int] = []
        self._unread: list[Accepted] = []  # of rounds that may still be running

    def restore_from(self, other: State) -> None:
        """Take over another's caches, not its answer; the other is of no more use."""
        self.cache, self.context, self.last = other.cache, other.context, None
        self.anchor = self.opening = mx.array([], dtype=mx.int32)
        self._tokens, self._unread, self.pieces = other.tokens, [], other.pieces
        self.settled = self.position == 0

    @property
    def position(self) -> int:
        """The anchor's position: the number of committed tokens."""
        return self.cache.length

    @property
    def has_begun(self) -> bool:
        return self.anchor.size > 0

    @property
    def remaining(self) -> int:
        return self.end - self.position

    @property
    def next_position(self) -> int:
        """Of the token that the target chooses next, behind the anchor."""
        return self.position + self.anchor.size

    @property
    def tokens(self) -> list[int]:
        """All tokens, the anchor last; waits for rounds that are still running."""
        for accepted in self._unread:
            self._tokens.extend(accepted.tokens)
        self._unread.clear()
        return self._tokens

    def commit(
        self, accepted: Accepted, ids: mx.array, features: mx.array | None, forced: bool = False
    ) -> None:
        """Keep an accepted path in every cache and make the target's token the anchor.

        ids: [N] of the verified nodes. features: [N, m*d], None for a drafter that reads none.
        forced: see `Proposal`.
        """
        kept = rows_on(accepted.path)
        was_waited_for = isinstance(accepted.token, int)
        self.settled = was_waited_for and isinstance(kept, slice) and not self.cache.is_recurrent
        self.cache.commit(accepted.path)
        self.context.append(ids[kept], None if features is None else features[kept])
        if not forced:
            self.last = accepted
        self._set_anchor(accepted)

    def settle(self) -> None:
        """Wait for what the next pass begins from."""
        mx.eval(self.anchor, *self.cache.arrays)
        self.settled = True

    def commit_prompt(self, prompt: Prompt, length: int, features: mx.array | None) -> None:
        """Keep the rows of a prefill pass over the next `length` tokens of `prompt`."""
        first = self.position
        tokens = prompt.tokens[first : first + length]
        self.cache.commit(range(length))
        self.cache.mark_chunk(prompt.ends)
        self.context.append(mx.array(tokens), features)
        there = (piece for piece in prompt.pieces if piece.start < first + length)
        self.pieces = tuple(Piece(p.start, p.length, p.digest) for p in there)  # no pixels
        self._tokens.extend(tokens)
        mx.eval(*self.cache.arrays, *self.context.arrays)
        self.settled = True

    def end_prompt(self, opening: mx.array) -> None:
        """Keep the logits [1, V] after a prompt, and a way back to before its last token."""
        mx.eval(opening)  # once a prompt: those of its other passes are never computed
        self.opening = opening
        self.cache.mark(self.position - 1)

    def begin(self, first: Accepted) -> None:
        self.last = None
        self.settled = isinstance(first.token, int)
        self._set_anchor(first)

    def _set_anchor(self, accepted: Accepted) -> None:
        self.anchor = accepted.next_anchor
        self._unread.append(accepted)
        if accepted.ends:
            self.end = self.position

    @property
    def keys(self) -> Sequence[int]:
        """Of the committed tokens, see `Prompt.key_at`."""
        tokens = self.tokens[: self.position]
        return Prompt(tuple(tokens), self.pieces).keys if self.pieces else tokens

    def reuse(self, prompt: Prompt) -> int:
        """Go back to the longest prefix shared with `prompt`; return its length.

        The last token of `prompt` is never reused: its pass says how the answer begins. Where a
        window or a recurrent state has no way back to that prefix, less of it is reused, or none.
        """
        self.trim(min(self._common_prefix(prompt), self.context.length))
        return self.position

    def match_length(self, prompt: Prompt) -> int:
        """What `reuse` would return."""
        return self.nearest(min(self._common_prefix(prompt), self.context.length))

    def _common_prefix(self, prompt: Prompt) -> int:
        return shared_length(self.keys, prompt.keys[:-1])

    def nearest(self, length: int) -> int:
        """The most tokens up to `length` that all caches can go back to."""
        length = self.cache.nearest(length)
        if (refilled := self.context.refill_from(length)) < length:
            length = self.cache.nearest(refilled)
        return length

    def trim(self, length: int) -> None:
        """Forget the tokens from `length` on, and those before that the caches need anew."""
        self.anchor = mx.array([], dtype=mx.int32)
        self.settled = False
        length = self.cache.rewind(self.nearest(length))
        self.context.trim(length)
        del self.tokens[length:]
        self.pieces = tuple(piece for piece in self.pieces if piece.start < length)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + sum(array.nbytes for array in self.context.arrays)

    def fork(self) -> State:
        """A copy of what is committed; storage is shared until either of them writes."""
        other = State(self.cache.fork(), self.context.fork())
        other._tokens, other.pieces = self.tokens[: self.position], self.pieces
        return other

    def saved(self) -> Saved:
        """All that is committed, the tokens first."""
        tokens = mx.array(self.tokens[: self.position], mx.int32)
        pieces = [(piece.start, piece.length, piece.digest) for piece in self.pieces]
        return join([([tokens], pieces), self.cache.saved(), self.context.saved()])

    def restore(self, saved: Saved) -> None:
        """Hold what another of the same kind has saved; this one was empty until now."""
        ((tokens,), pieces), cache, context = split(saved)
        self.cache.restore(cache)
        self.context.restore(context, tokens)
        self._tokens = tokens.tolist()  # type: ignore[assignment]
        self.pieces = tuple(Piece(*piece) for piece in pieces)
