"""What the ranks tell each other, over MLX's own group.

Everything here is a collective operation: all ranks call it, in the same order. MLX raises where
the connection to a rank is lost, and waits for ever for one that hangs.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from dflash_mlx.core.errors import DFlashError, in_one_line
from dflash_mlx.ranks import RanksLost

END = "end"  # the last order
PROBLEM = "problem"  # of a rank that cannot compare the rest
_MEETING = 28  # seconds until all have to be connected
_LAST_PASS = 10  # seconds for the pass that is under way when the first rank ends
_MOST = 1 << 30  # bytes of a message

_Prepared = TypeVar("_Prepared")
Found = list[tuple[mx.array, mx.array | None]]  # logits and features of each sequence of a pass


class RanksDiffer(DFlashError):
    """One rank has something else than the first, which all of them know."""


class Ranks:
    """All processes of one start, seen from one of them."""

    def __init__(self, group: Any) -> None:
        self.group = group  # MLX's
        self.rank, self.size = int(group.rank()), int(group.size())
        self._passing = threading.Lock()  # an order and its pass are one, whatever thread is at it
        self._last: list[mx.array] = []  # of the pass under way; another thread has another stream

    def share(self, value: Any = None, root: int = 0) -> Any:
        data = np.frombuffer(json.dumps(value).encode() * (self.rank == root), np.uint8)
        length = self._total(data.size)
        if not 0 < length <= _MOST:
            raise RanksLost("the ranks are not at the same operation")
        own = mx.array(data) if self.rank == root else mx.zeros(length, mx.uint8)
        return json.loads(bytes(np.array(self._sum(own))))

    def check_alike(self, own: Mapping[str, Any]) -> None:
        """RanksDiffer, on all, where one rank has something else than the first."""
        first, *others = every = [self.share(own, root) for root in range(self.size)]
        for rank, its in enumerate(every):
            if problem := its.get(PROBLEM):
                raise RanksDiffer(f"rank {rank} of {self.size}: {problem[0]}", problem[1])
        for rank, its in enumerate(others, 1):
            for key in [*first, *its]:
                if first.get(key) != its.get(key):
                    differs = f"{key} is {its.get(key)} there and {first.get(key)} on rank 0"
                    what = f"rank {rank} of {self.size} differs: {differs}"
                    raise RanksDiffer(what, "let all ranks have the same")

    def agree(self, prepare: Callable[[], _Prepared]) -> _Prepared:
        """What `prepare` returns, where it has worked on every rank.

        Its own error where it failed on all alike, RanksLost where it failed on some.
        """
        failed: Exception | None = None
        try:
            found = prepare()
        except Exception as error:
            failed = error
        if self._total(int(failed is not None)) not in (0, self.size):
            why = in_one_line(failed) if failed else "see the message of another rank"
            raise RanksLost(f"work has failed on some of the ranks ({why})") from failed
        if failed is not None:
            raise failed
        return found

    def run_pass(self, orders: Callable[[], Sequence[Any]], prepare: Callable[[], Found]) -> Found:
        """Tell the followers `orders`, and begin the pass that these and `prepare` make.

        It begins at once and whole: what MLX puts off until somebody asks would be asked for on
        the first rank alone.
        """
        with self._passing, _interrupts_wait():
            mx.eval(self._last)
            self.share(orders())
            found = self.agree(prepare)
            arrays = [array for pair in found for array in pair if array is not None]
            try:
                mx.async_eval(arrays)
            except Exception as error:  # others wait for its sums by now
                raise RanksLost(f"a pass failed on rank 0: {in_one_line(error)}") from error
            self._last = [found[-1][0]]
        return found

    def end(self) -> None:
        """Let the followers end, once the pass under way is over; no other begins."""
        if self._passing.acquire(timeout=_LAST_PASS):
            with suppress(RuntimeError), ends_at_once(_LAST_PASS):
                mx.eval(self._last)
                self.share([[END]])

    def _total(self, number: int) -> int:
        total: Any = self._sum(mx.array(number, mx.int32)).item()
        return int(total)

    def _sum(self, array: mx.array) -> mx.array:
        total = mx.distributed.all_sum(array, group=self.group, stream=mx.cpu)
        mx.eval(total)  # lets other threads run, as `item` would not
        return total


def join() -> Ranks:
    """The ranks of this start, once all have come; DFlashError where they cannot be reached."""
    try:
        with ends_at_once(_MEETING):
            return Ranks(mx.distributed.init())
    except (RuntimeError, ValueError) as error:
        what = f"the other ranks cannot be reached ({in_one_line(error)})"
        raise DFlashError(what, "see whether all were started, and their addresses") from None


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Within it Ctrl+C is noted, and comes at the end: ranks end a pass only where all began it.

    Where it fails, its error is what comes.
    """
    handler, came = signal.getsignal(signal.SIGINT), []
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # no interrupt is raised here
        return
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    for number in came[:1]:
        signal.raise_signal(number)


@contextmanager
def ends_at_once(seconds: int) -> Iterator[None]:
    """Within it Ctrl+C ends the process, and so does a wait of so many seconds.

    While MLX waits, no handler in Python runs. SIGTERM is nobody's here, so a launcher can end it.
    """
    kinds = (signal.SIGINT, signal.SIGALRM)
    signal.alarm(seconds)  # first: a timer that looks after an interrupt may be running
    before = [signal.signal(kind, signal.SIG_DFL) for kind in kinds]
    try:
        yield
    finally:
        signal.alarm(0)
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
