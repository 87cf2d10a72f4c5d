"""The one thread that decodes: it steps while there is work, and takes orders between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.session.answer import Answering, TextDelta
from dflash_mlx.session.logprobs import TokenLogprobs, logprobs_of
from dflash_mlx.session.many import Conversations

T = TypeVar("T")


@dataclass(eq=False)
class Asked:
    """One answer that is asked for; itself the handle by which it is known.

    tops: likeliest tokens to tell with every token, where `config` asks for log-probabilities.
    behind: another answer to the same prompt, which is read once.
    """

    tokens: tuple[int, ...]
    config: DecodeConfig
    tops: int = 0
    behind: Asked | None = None


@dataclass(frozen=True)
class Begun:
    """The answer is taken in; it is read as soon as there is room."""


@dataclass(frozen=True)
class Piece:
    """What a step added to an answer.

    reason: as of `TextDelta`, None before the last piece. statistics: one object that goes on
    counting. parked: says why the latest round without drafts had none; None where none was chosen
    so. stop_text: the one that ended the answer.
    """

    text: str
    tokens: tuple[int, ...]
    laws: tuple[TokenLogprobs, ...]
    reason: str | None
    statistics: Statistics
    parked: Callable[[], str] | None
    stop_text: str | None


News = tuple[Asked, "Begun | Piece | Exception"]


@dataclass
class _Open:
    """An answer in the making."""

    asked: Asked
    answering: Answering
    parked: Callable[[], str] | None = field(default=None)

    def piece(self, delta: TextDelta) -> Piece:
        if delta.proposal.mode == "plain":
            self.parked = delta.proposal.why
        return Piece(
            delta.text,
            delta.tokens,
            logprobs_of(delta, self.asked.tops),
            delta.finish_reason,
            delta.statistics,
            self.parked,
            self.answering.stop_text,
        )


class Stepper:
    """All MLX work, on a thread of its own.

    post: hears the news of every step; called on the thread, so it must return at once. used: bytes
    of all answers' caches after the last step. steps: how many there were.
    """

    def __init__(self, post: Callable[[list[News]], object]) -> None:
        self.used = self.steps = 0
        self._post = post
        self._orders: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._make: Callable[[], Conversations] | None = None
        self._conversations: Conversations | None = None
        self._open: dict[Asked, _Open] = {}
        self._thread = threading.Thread(target=self._run, name="stepper", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run something on the thread, between two steps; before there is anything to decode."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._orders.put(run)
        return future

    def serve(self, make: Callable[[], Conversations]) -> Future[None]:
        """Answer with what `make` returns; called again after a fault of the engine."""

        def begin() -> None:
            self._make, self._conversations = make, make()

        return self.call(begin)

    @property
    def idle(self) -> bool:
        """Whether nothing is answered."""
        return not self._open

    def save(self) -> str:
        """Keep on the disk what was read, for the thread alone; why that could not be, or ""."""
        assert self._conversations is not None
        prefixes = self._conversations.engine.prefixes
        if prefixes is None:
            return ""
        prefixes.save()
        return prefixes.problem

    def begin(self, asked: Asked) -> None:
        """Take in an answer; Begun or an exception is its first news."""
        self._orders.put(lambda: self._begin(asked))

    def cancel(self, asked: Asked) -> None:
        """Give up an answer before the next step; nothing more is heard of it."""
        self._orders.put(lambda: self._cancel(asked))

    def close(self, seconds: float) -> bool:
        """End the thread; False where it is still busy after `seconds`."""
        self._orders.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._take_orders():
            if self._open:
                self._step()

    def _take_orders(self) -> bool:
        """Do what was asked for meanwhile, or wait for it while there is nothing else to do."""
        wait = not self._open
        while True:
            try:
                order = self._orders.get(block=wait)
            except Empty:
                return True
            if order is None:
                return False
            order()
            wait = False

    def _begin(self, asked: Asked) -> None:
        assert self._conversations is not None
        try:
            first = self._open.get(asked.behind) if asked.behind is not None else None
            behind = None if first is None else first.answering
            answering = self._conversations.begin(asked.tokens, asked.config, behind)
        except Exception as error:  # of any kind: the others go on
            self._post([(asked, error)])
        else:
            self._open[asked] = _Open(asked, answering)
            self._post([(asked, Begun())])

    def _cancel(self, asked: Asked) -> None:
        if (gone := self._open.pop(asked, None)) is not None and self._conversations is not None:
            self._conversations.cancel(gone.answering)
            self._look()

    def _step(self) -> None:
        assert self._conversations is not None
        try:
            found = self._conversations.step()
            by_answering = {id(each.answering): each for each in self._open.values()}
            news = [self._told(by_answering[id(each)], said) for each, said in found]
        except Exception as error:  # a fault of ours, after which no cache can be trusted
            news = [(asked, error) for asked in self._open]
            self._conversations = self._make() if self._make is not None else None
        for asked, said in news:
            if isinstance(said, Exception) or (isinstance(said, Piece) and said.reason is not None):
                self._open.pop(asked, None)
        self._look()
        if news:
            self._post(news)

    def _told(self, each: _Open, said: TextDelta | Exception) -> News:
        return each.asked, said if isinstance(said, Exception) else each.piece(said)

    def _look(self) -> None:
        self.steps += 1
        if self._conversations is not None and (self.steps % 16 == 0 or not self._open):
            self.used = self._conversations.engine.used
