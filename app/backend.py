"""What the worker thread does for the chat: load a pair, time it, answer, race."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass

import mlx.core as mx

from dflash_chat.speeds import Timing
from dflash_mlx.client import (
    DFlashError,
    Observer,
    Pair,
    PairConfig,
    PrefixCache,
    Question,
    Responder,
    check_memory,
    comparing,
    load_pair,
    race,
)

Events = Generator[object, None, None]


@dataclass(frozen=True)
class Loaded:
    """A pair is ready. memory: bytes that MLX holds with it, 0 for unknown."""

    pair: Pair
    memory: int = 0


class Backend:
    """The events of each job, as `Worker.submit` takes them; only its thread iterates them.

    prefixes: makes what keeps conversations with a pair for their next turns. problem: a sentence
    about why it could not, "" for nothing.
    """

    def __init__(self, prefixes: Callable[[], PrefixCache] = PrefixCache) -> None:
        self.problem = ""
        self._prefixes = prefixes
        self._responder: Responder | None = None

    def load(self, config: PairConfig) -> Events:
        """Load a pair in place of the one before, which stays when that fails: Loaded.

        What does not fit in memory is refused before.
        """
        check_memory(config)
        pair = load_pair(config)
        self.leave()
        self._responder = Responder(pair, self._prefixes())
        yield Loaded(pair, mx.get_active_memory())

    def measure(self, again: bool) -> Events:
        """Time the passes of this pair before anybody waits for them: a Timing, then drafters.

        Which is fastest is a sentence. It ends where another pair is loaded meanwhile. again:
        though this machine was measured before.
        """
        responder = self._loaded()
        for done, total in responder.pair.calibrating(again):
            if responder is not self._responder:
                return
            # A line as the screen reads it from what libraries print.
            sys.stderr.write(f"\rmeasuring this machine, once: {100 * done // total:3}%|")
            yield done
        yield Timing(*responder.plain_speed())
        for said in comparing(responder.pair, again):
            if responder is not self._responder:
                return
            yield said

    def answer(self, request: Question, observer: Observer) -> Events:
        """Answer: a Delta per round."""
        yield from self._loaded().answer(request, observer)

    def race(self, request: Question) -> Events:
        """Decode plainly and with drafts: RaceSteps, then a RaceResult."""
        yield from race(self._loaded().pair, request)

    def forget(self) -> Events:
        """Keep nothing that was read of any conversation, in memory or on the disk."""
        if self._responder is not None:
            self._responder.prefixes.clear()
        yield from ()

    def leave(self) -> None:
        """Keep on the disk what was read with this pair; after it comes another one, or the end."""
        if self._responder is not None:
            why = self._responder.prefixes.save()
            self.problem = self.problem or why

    def _loaded(self) -> Responder:
        if self._responder is None:
            raise DFlashError("no model is loaded", "choose one with /model")
        return self._responder
