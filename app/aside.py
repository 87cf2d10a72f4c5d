"""Work that may take long, or never end: on threads that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from inspect import isawaitable
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from textual.message_pump import MessagePump

from dflash_chat.problems import describe
from dflash_mlx.client import DFlashError

T = TypeVar("T")
Then = Callable[[T], object]  # may return something to be awaited


def aside(action: Callable[[], T]) -> Future[T]:
    """Begin `action` on a thread of its own."""
    future: Future[T] = Future()
    Thread(target=_settle, args=(future, action), daemon=True).start()
    return future


class Line:
    """A thread that does one thing after the other."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        Thread(target=self._work, daemon=True).start()

    def put(self, action: Callable[[], T]) -> Future[T]:
        """Do `action` when its turn has come."""
        future: Future[T] = Future()
        self._waiting.put((future, action))
        return future

    def _work(self) -> None:
        while True:
            _settle(*self._waiting.get())


def _settle(future: Future[T], action: Callable[[], T]) -> None:
    try:
        result = action()
    except Exception as error:  # the edge of a thread
        future.set_exception(error)
    else:
        future.set_result(result)


class Asks(MessagePump):
    """A widget or an app that asks disks and hubs aside, and goes on when it knows."""

    def hear(self, future: Future[T], then: Then[T], otherwise: Then[str] | None = None) -> None:
        """Call `then` with the result, in this widget's own turn, unless it is closed by then.

        otherwise: takes the sentence about what went wrong, in place of `refuse`.
        """

        def tell(_: object) -> None:
            with suppress(RuntimeError):  # the program has ended
                self.call_later(self._heard, future, then, otherwise or self.refuse)

        future.add_done_callback(tell)

    def refuse(self, problem: str) -> object:
        """Say what could not be done; here nobody is told."""

    async def _heard(self, future: Future[T], then: Then[T], otherwise: Then[str]) -> None:
        try:
            await _awaited(then(future.result()))
        except Exception as error:
            if error is not future.exception() and not isinstance(error, DFlashError):
                raise
            await _awaited(otherwise(describe(error)))


async def _awaited(outcome: object) -> None:
    if isawaitable(outcome):
        await outcome
