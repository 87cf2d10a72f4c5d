"""Responses that clients may go on from: kept in memory, the least used of them out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_mlx.serve.chat import Json
from dflash_mlx.serve.errors import ApiError

_MOST, _BYTES = 1000, 64 * 10**6  # of all clients together


@dataclass(frozen=True)
class Kept:
    """A response, and the conversation before it; both as JSON."""

    response: bytes
    before: bytes
    output: Sequence[Json] = ()  # the items that the response adds

    @property
    def size(self) -> int:
        """Bytes, about."""
        return 2 * len(self.response) + len(self.before)


class Shelf:
    """Responses by who asked for them and their id: nobody finds those of another key."""

    def __init__(self, most: int = _MOST, size: int = _BYTES) -> None:
        self._most, self._size = most, size
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._items: dict[tuple[str, str], Json] = {}  # of all of them, by owner and id
        self.size = 0  # bytes

    def put(self, owner: str, name: str, kept: Kept) -> None:
        """Keep one, and drop others for it; one that is too large is not kept."""
        if kept.size > self._size:
            return
        self._kept[owner, name] = kept
        self._items |= {(owner, each["id"]): each for each in kept.output}
        self.size += kept.size
        while self.size > self._size or len(self._kept) > self._most:
            self.drop(*next(iter(self._kept)))

    def get(self, owner: str, name: str, field: str | None = None) -> Kept:
        """The one of this id; ApiError (about a field) where it is not there."""
        if (found := self._kept.get((owner, name))) is None:
            what = f"the response {name[:80]!r} is not kept here (any more)"
            raise ApiError(404, f"{what}; send the whole conversation as input", field)
        self._kept.move_to_end((owner, name))
        return found

    def drop(self, owner: str, name: str) -> None:
        """Forget one; ApiError where it is not there."""
        kept = self.get(owner, name)
        self.size -= kept.size
        del self._kept[owner, name]
        for each in kept.output:
            self._items.pop((owner, each["id"]), None)

    def item(self, owner: str, name: str) -> Json:
        """An item of a response that is kept; ApiError where it is not there."""
        if (found := self._items.get((owner, name))) is None:
            what = f"the item {name[:80]!r} is not kept here (any more)"
            raise ApiError(404, f"{what}; send it whole", "input")
        return found
