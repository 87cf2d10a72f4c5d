"""What the worker thread does for the chat: load a pair, time it, answer, race."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx

from dflash_chat.adapting import learning
from dflash_chat.speeds import Timing
from dflash_mlx.client import (
    DFlashError,
    Observer,
    Pair,
    PairConfig,
    PrefixCache,
    Question,
    Responder,
    Stores,
    check_memory,
    comparing,
    load_pair,
    race,
)

Events = Generator[object, None, None]
_WRITING = 2.0  # seconds that the last answer may take to be kept


@dataclass(frozen=True)
class Loaded:
    """A pair is ready. memory: bytes that MLX holds with it, 0 for unknown."""

    pair: Pair
    memory: int = 0


class Backend:
    """The events of each job, as `Worker.submit` takes them; only its thread iterates them.

    prefixes: makes what keeps conversations with a pair for their next turns. earlier: what drafts
    may come from beside their own conversation. problem: a sentence about why something could not
    be kept, "" for nothing.
    """

    def __init__(
        self, prefixes: Callable[[], PrefixCache] = PrefixCache, earlier: Stores | None = None
    ) -> None:
        self.problem, self._config = "", PairConfig()  # of the loaded pair
        self._prefixes, self._earlier = prefixes, earlier or Stores(limit=0)
        self._responder: Responder | None = None
        self._private: Responder | None = None  # of the incognito conversation
        self._learning: Iterator[str | None] | None = None

    def load(self, config: PairConfig) -> Events:
        """Load a pair in place of the one before, which stays when that fails: Loaded.

        What does not fit in memory is refused before.
        """
        check_memory(config)
        pair = load_pair(config)
        self.leave()
        self._private, self._config, self._learning = None, config, None
        earlier = self._earlier.of(pair.target.name, pair.tokenizer)
        self._responder = Responder(pair, self._prefixes(), earlier)
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

    def answer(self, request: Question, observer: Observer, private: bool = False) -> Events:
        """Answer: a Delta per round. private: nothing of it stays for other conversations."""
        responder = self._loaded()
        self._private = (self._private or Responder(responder.pair)) if private else None
        yield from (self._private or responder).answer(request, observer)

    def race(self, request: Question) -> Events:
        """Decode plainly and with drafts: RaceSteps, then a RaceResult."""
        yield from race(self._loaded().pair, request)

    def learn(self, folder: Path) -> Events:
        """Let the draft model learn from the conversations in a folder; goes on where it ended."""
        work = self._learning or learning(self._loaded().pair, self._config, folder)
        self._learning = work
        yield from iter(partial(next, work, ""), "")  # that closes nothing when it is closed

    def forget(self) -> Events:
        """Keep nothing that was read or said in any conversation, in memory or on the disk."""
        self._private = self._learning = None
        (self._responder.prefixes if self._responder else self._prefixes()).clear()
        self._earlier.forget()
        yield from ()

    def leave(self) -> None:
        """Keep on the disk what was read with this pair; after it comes another one, or the end."""
        if self._responder is not None:
            why = self._responder.prefixes.save()
            self.problem = self.problem or why
        self.problem = self.problem or self._earlier.finish(_WRITING)

    def _loaded(self) -> Responder:
        if self._responder is None:
            raise DFlashError("no model is loaded", "choose one with /model")
        return self._responder
