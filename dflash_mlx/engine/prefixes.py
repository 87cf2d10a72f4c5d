"""States of sequences that are over, for those that begin alike: what they share is read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.core.prompt import Prompt
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.prefix_files import CacheKey, PrefixFiles
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.model import Target


@dataclass
class _Entry:
    """A state that nobody writes to."""

    cache_key: CacheKey
    state: State
    nbytes: int
    on_disk: bool = False

    def covers(self, other: _Entry) -> bool:
        """Whether whatever could go on from the other can go on from this as well."""
        end = other.state.position
        alike = self.cache_key == other.cache_key and end <= self.state.position
        same = alike and [*self.state.keys[:end]] == [*other.state.keys]
        return same and self.state.nearest(end) == end


class PrefixCache:
    """States of sequences that are over, the last used ones, for one thread; none of `exact`."""

    def __init__(self, limit: int = 0, files: PrefixFiles | None = None) -> None:
        self.limit = limit  # bytes in memory; the newest state stays until another begins
        self.files = files  # where states go that have to leave the memory, None for nowhere
        self._entries: list[_Entry] = []  # the least recently used first

    @property
    def nbytes(self) -> int:
        """Bytes in memory; what a running sequence still shares is counted here as well."""
        return sum(entry.nbytes for entry in self._entries)

    def take(
        self,
        prompt: Prompt | Sequence[int],
        target: Target,
        drafter: Drafter,
        running: Sequence[State] = (),
    ) -> State:
        """A state from which `State.reuse` keeps most of `prompt`; empty where there is none.

        It is the caller's. Where there is no room for a copy the cache gives up its own, unless the
        prompt needs less than half of it. running: states of unfinished sequences, which go on.
        """
        prompt = Prompt.of(prompt)

        def empty() -> State:
            return State(target.new_cache(), drafter.new_context())

        cache_key = CacheKey.of(target, drafter, state := empty())
        best, length = self._best(cache_key, prompt)
        source = max(running, key=lambda each: each.match_length(prompt), default=state)
        if source.match_length(prompt) > length:
            mx.eval(source.cache.arrays, source.context.arrays)
            return source.fork()
        if self.files and (found := self.files.find(cache_key, prompt, length, empty)):
            best, length = _Entry(cache_key, found, found.nbytes, True), found.match_length(prompt)
        if best is None:
            self.shrink(self.limit)
            return state
        self._entries = [entry for entry in self._entries if entry is not best]
        position = best.state.position
        fits = best.nbytes + best.nbytes * length // position <= self.limit
        stays = fits or 2 * length < position
        if stays:
            self._entries.append(best)
        state = best.state.fork() if stays else best.state
        self.shrink(self.limit)
        return state

    def put(self, state: State, target: Target, drafter: Drafter) -> None:
        """Keep what a sequence has committed; its owner may go on with `state`."""
        if not state.position:
            return
        mx.eval(state.cache.arrays, state.context.arrays)
        kept = state.fork()
        new = _Entry(CacheKey.of(target, drafter, kept), kept, kept.nbytes)
        new = next((old for old in self._entries if old.covers(new)), new)
        self._entries = [old for old in self._entries if not new.covers(old)]
        self._entries.append(new)
        self.shrink(self.limit, least=1)

    def save(self) -> str:
        """Write to the disk what is not there yet; why that could not be, or ""."""
        for entry in self._entries:
            self._save(entry)
        return "" if self.files is None else self.files.problem

    def forget(self, target: Target) -> bool:
        """Let the states of a target go, one with each call; whether none is left."""
        own = [entry for entry in self._entries if entry.cache_key.target is target]
        if own:
            self._save(own[0])
            self._entries = [entry for entry in self._entries if entry is not own[0]]
        elif self.files is not None:
            self.files.forget(target)
        return not own

    def clear(self) -> None:
        self._entries.clear()
        if self.files is not None:
            self.files.clear()

    def _best(self, cache_key: CacheKey, prompt: Prompt) -> tuple[_Entry | None, int]:
        best, most = None, 0
        for entry in reversed(self._entries):
            if entry.cache_key == cache_key and (length := entry.state.match_length(prompt)) > most:
                best, most = entry, length
        return best, most

    def shrink(self, limit: int, least: int = 0) -> None:
        """Let go of what was used least recently, down to `limit` bytes or `least` states."""
        while len(self._entries) > least and self.nbytes > limit:
            self._save(self._entries.pop(0))

    def _save(self, entry: _Entry) -> None:
        if self.files is not None and not entry.on_disk:
            entry.on_disk = self.files.write(entry.cache_key, entry.state)
