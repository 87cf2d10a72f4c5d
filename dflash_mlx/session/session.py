"""One conversation after another: answers as they are decoded, with caches that turns reuse."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import platformdirs

from dflash_mlx.core.config import DecodeConfig, PrefixConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.core.statistics import Observer
from dflash_mlx.drafters.continuations.store import Stores
from dflash_mlx.drafters.methods import settle
from dflash_mlx.engine.delta import BEGIN, Answer, Delta, collect, opens_thought
from dflash_mlx.engine.exact import noise_of
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefix_files import PrefixFiles
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.sequence import Sequence, constraint_of
from dflash_mlx.engine.state import Earlier, State
from dflash_mlx.session.channels import in_channels, marked, without_thoughts
from dflash_mlx.session.forms import form_of
from dflash_mlx.session.memory import CacheMemory, for_caches, prefix_bytes
from dflash_mlx.session.scheduler import Drafters, Scheduler
from dflash_mlx.session.templates import Conversation, Message, prompt_of
from dflash_mlx.verifier.pass_times import timing_day
from dflash_mlx.vision.album import Album

LONG = 2048  # tokens of prompts that are looked at for whether they fit into memory


class Session:
    """One conversation with one pair: turns reuse the caches of the turns before; for one thread.

    Raises DFlashError where the method or the grammar does not fit the pair.
    """

    def __init__(
        self,
        pair: Pair,
        config: DecodeConfig | None = None,
        prefixes: PrefixCache | None = None,
        drafters: Drafters | None = None,
        earlier: Earlier | None = None,
    ) -> None:
        self.pair = pair
        self.earlier = earlier  # other conversations that drafts may come from, see `Store`
        # Where turns find and leave their caches; without any, the last turn's are kept.
        self.prefixes = prefixes or PrefixCache()
        # Of every turn, with a method in place of `auto`.
        self.config = settle(config or DecodeConfig(), pair.capabilities)
        self.drafters = {} if drafters is None else drafters  # see `Scheduler.drafter`
        constraint_of(pair, self.config, ())
        if self.config.guarded:
            noise_of(pair.target)  # now, not in the time of the first answer
        self.state = self._empty()  # of the last turn
        self._thread: int | None = None

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
        scheduler, prompt = self._scheduler(observer), Prompt.of(tokens)
        if len(prompt) >= LONG:
            scheduler.memory = self.pair.recall(("memory",), partial(CacheMemory, None))
            scheduler.memory.limit = for_caches(self.prefixes.nbytes)
        return self._deltas(scheduler, scheduler.submit(prompt, self.config, None, self.earlier))

    def _deltas(self, scheduler: Scheduler, sequence: Sequence) -> Iterator[Delta]:
        self.state = sequence.state
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
                    scheduler.observer.mark("yield")
        except GeneratorExit:  # the caller has stopped between two rounds
            raise
        except BaseException:
            scheduler.drop(sequence)
            self.state = self._empty()
            raise
        finally:
            if not sys.is_finalizing():  # then nobody asks for the caches any more
                scheduler.cancel(sequence)

    def _scheduler(self, observer: Observer | None = None) -> Scheduler:
        scheduler = Scheduler(self.pair, None, observer, self.prefixes, 1)
        scheduler.drafters = self.drafters
        return scheduler

    def _empty(self) -> State:
        drafter = self._scheduler().drafter(self.config, self.pair)
        return State(self.pair.target.new_cache(), drafter.new_context())


def stream(
    pair: Pair,
    prompt: Conversation,
    config: DecodeConfig | None = None,
    system: str | None = None,
    observer: Observer | None = None,
) -> Iterator[Delta]:
    """Answer one prompt, a delta per round.

    prompt: a user's text, or a conversation as messages with "role" and "content", see `prompt_of`.
    Raises DFlashError for an empty or too long prompt and for settings that do not fit the pair.
    """
    return Session(pair, config).stream(prompt_of(pair, prompt, system), observer)


def generate(
    pair: Pair,
    prompt: Conversation,
    config: DecodeConfig | None = None,
    system: str | None = None,
) -> Answer:
    """The whole answer to one prompt; arguments and errors as for `stream`."""
    return collect(stream(pair, prompt, config, system))


@dataclass(frozen=True)
class Question:
    """A conversation to go on with, the question last."""

    messages: tuple[Message, ...]
    system: str | None
    config: DecodeConfig
    album: Album | None = None  # of the pictures that lines of the questions stand for

    @property
    def opened(self) -> list[Message]:
        """The messages with their pictures; DFlashError for one that is not there any more."""
        return [*self.messages] if self.album is None else self.album.opened(self.messages)


class Responder:
    """Answers questions of any conversation and with any settings, one after another."""

    def __init__(
        self,
        pair: Pair,
        prefixes: PrefixCache | None = None,
        earlier: Earlier | None = None,  # what drafts may come from, and what is said is added to
    ) -> None:
        self.pair, self.prefixes, self._earlier = pair, prefixes or PrefixCache(), earlier
        self._drafters: Drafters = {}

    def answer(
        self, asked: Question, observer: Observer | None = None
    ) -> Generator[Delta, None, None]:
        """A delta per round; a thought that the chat template opened is opened in the text.

        Where the last message is the model's, it writes on where that ends.
        """
        pair, asked_for, form = self.pair, asked.opened, form_of(self.pair)
        said = asked_for.pop()["content"] if asked_for[-1]["role"] == "assistant" else ""
        asked_for = without_thoughts(asked_for) if form.has_channels else asked_for
        prompt = prompt_of(pair, asked_for, asked.system)
        session = Session(pair, asked.config, self.prefixes, self._drafters, self._earlier)
        opening = BEGIN if opens_thought(pair.tokenizer, prompt.tokens) else ""
        if said:  # with its thought, which chat templates take out of messages
            said, opening = said.removeprefix(opening), ""
            said = in_channels(said) if form.has_channels else said
            begun = pair.tokenizer.encode(said, add_special_tokens=False)
            prompt = replace(prompt, tokens=(*prompt.tokens, *begun))
        deltas = session.stream(prompt, observer)
        for delta in marked(deltas, form, said) if form.has_channels else deltas:
            yield replace(delta, text=opening + delta.text) if opening else delta
            opening = ""

    def plain_speed(self) -> tuple[float, str]:
        """Tokens per second without drafts by the timed passes, and their day; 0 and "" without."""
        target = self.pair.target
        if target.pass_times is None:
            return 0.0, ""
        return 1 / float(target.pass_times.of(1)), timing_day(target)


def earlier_texts(config: PrefixConfig, on_disk: bool = True, users: int = 1) -> Stores:
    """What drafts may come from beside their own conversation."""
    folder = platformdirs.user_cache_path("dflash-chat") / "lookup" if on_disk else None
    megabytes = config.lookup_mb if config.lookup_in == "all" else 0
    return Stores(folder, int(megabytes * 1e6) // max(1, users))


def prefix_cache(config: PrefixConfig, folder: Path | None = None) -> PrefixCache:
    """A cache for one pair, as the settings say. folder: of its files, by default the user's."""
    disk = int(config.prefix_disk_gb * 1e9)
    place = folder or platformdirs.user_cache_path("dflash-chat") / "prefixes"
    return PrefixCache(prefix_bytes(config), PrefixFiles(place, disk))
