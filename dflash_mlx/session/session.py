"""One conversation: answers as they are decoded, with caches that later turns reuse."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Hashable, Iterable, Iterator

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.observer import Observer
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.drafters.methods import drafting_of, make_drafter, settle
from dflash_mlx.engine.delta import Answer, Delta, collect
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.exact import noise_of
from dflash_mlx.engine.grammar import constraint_of
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.engine.state import State
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.templates import Conversation, prompt_tokens


class Session:
    """One conversation with one pair: turns reuse the caches of the turns before; for one thread.

    config: settings of every turn, with a method in place of `auto` once it is made. prefixes:
    where turns find and leave their caches; without any, the last turn's are kept. Raises
    DFlashError where the method or the grammar does not fit the pair.
    """

    def __init__(
        self, pair: Pair, config: DecodeConfig | None = None, prefixes: PrefixCache | None = None
    ) -> None:
        self.pair = pair
        self.prefixes = prefixes or PrefixCache()
        self.config = settle(config or DecodeConfig(), pair.capabilities)
        constraint_of(pair, self.config, 0)
        if self.config.guarded:
            noise_of(pair.target)  # now, not in the time of the first answer
        self.drafter = make_drafter(pair, self.config)
        self._thread: int | None = None
        self.state = self._empty()

    def stream(
        self, tokens: Prompt | Iterable[int], observer: Observer | None = None
    ) -> Iterator[Delta]:
        """Answer the prompt `tokens`: the whole conversation so far, one delta per round.

        What the caches hold of it is not computed again. The caller may stop at any time and call
        again. Raises DFlashError when the prompt is empty or does not fit the context, and in
        another thread than the first call's.
        """
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            what = "this Session belongs to the thread of its first answer"
            raise DFlashError(what, "make a Session for each thread, or give the work to a Worker")
        self._thread = thread
        drafters: dict[Hashable, Drafter] = {drafting_of(self.config): self.drafter}
        scheduler = Scheduler(self.pair, None, observer, self.prefixes, 1, drafters=drafters)
        return self._deltas(scheduler, scheduler.submit(tokens, self.config))

    def _deltas(self, scheduler: Scheduler, sequence: Sequence) -> Iterator[Delta]:
        """Step until the answer is over; empty caches where a pass broke off half-way."""
        self.state, observer = sequence.state, scheduler.observer
        sequence.start_clock()
        try:
            while len(scheduler):
                for _, said in scheduler.step():
                    if isinstance(said, Exception):
                        raise said
                    begin = time.perf_counter()
                    yield said
                    sequence.state.paused += time.perf_counter() - begin
                    sequence.resume()
                    observer.mark("yield")
        except GeneratorExit:  # the caller has stopped between two rounds
            raise
        except BaseException:
            scheduler.drop(sequence)
            self.state = self._empty()
            raise
        finally:
            if not sys.is_finalizing():  # then nobody asks for the caches any more
                scheduler.cancel(sequence)

    def _empty(self) -> State:
        return State(self.pair.target.new_cache(), self.drafter.new_context())


def stream(
    pair: Pair,
    prompt: Conversation,
    config: DecodeConfig | None = None,
    system: str | None = None,
    observer: Observer | None = None,
) -> Iterator[Delta]:
    """Answer one prompt, a delta per round.

    prompt: a user's text, or a conversation as messages with "role" and "content".
    Raises DFlashError for an empty or too long prompt and for settings that do not fit the pair.
    For conversations with reused caches see `Session`.
    """
    tokens = prompt_tokens(pair.tokenizer, prompt, system, template=pair.template)
    return Session(pair, config).stream(tokens, observer)


def generate(
    pair: Pair,
    prompt: Conversation,
    config: DecodeConfig | None = None,
    system: str | None = None,
) -> Answer:
    """The whole answer to one prompt; arguments and errors as for `stream`."""
    return collect(stream(pair, prompt, config, system))
