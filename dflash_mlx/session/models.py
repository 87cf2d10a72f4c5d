"""Several models of one worker: loaded when asked for, unloaded when others need their memory."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import amount
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.memory import is_short
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.worker import Job, Worker
from dflash_mlx.system.machine import free_memory

Measure = Callable[[Pair], Generator[object, None, None]]
PATIENCE = 120.0  # seconds after which nobody waits for a load any more, nor does another load
# Seconds until it is looked again for room, for how a load goes, and for idle models.
_AGAIN, _SOON, _LOOK = 0.05, 1.0, 10.0


@dataclass(eq=False)
class Model:
    """A model, and its pair while that is in memory."""

    names: tuple[str, ...]  # its own first
    load: Callable[[], Pair] = field(repr=False)
    needs: int = 0  # bytes of memory, 0 where that is unknown
    pair: Pair | None = field(default=None, repr=False)
    users: int = 0  # who wait for it, or are about to ask it
    used: float = 0.0  # when it last was, by time.monotonic()
    loading: asyncio.Future[None] | None = None
    is_late: bool = False  # its load takes longer than anybody waits
    problem: Exception | None = None  # of the last load
    measuring: Job | None = field(default=None, repr=False)


class Models:
    """Loads one at a time while answers stream on; the next one does not wait for a late load.

    It takes the place of those that were used least recently, never of one that is answering: if
    all are, it waits, and so do further users of them, or its turn would never come. For one event
    loop.
    """

    def __init__(
        self,
        models: Sequence[Model],
        worker: Worker,
        answers: Callable[[Pair], bool],  # whether a pair is answering
        memory: Callable[[int], int | None],  # bytes for caches, which now hold so many
        most: int | None = None,  # in memory at once, None for as many as fit
    ) -> None:
        self.by_name = {name: model for model in models for name in model.names}
        self._all, self._worker, self._answers = [*models], worker, answers
        self._memory, self._most = memory, most or len(models)
        self.spare: Callable[[], object] = lambda: None  # gives up what can be done without
        self._measure: Measure | None = None
        self._loader = ThreadPoolExecutor(len(models), "loader")  # as some may hang
        self._turn = asyncio.Lock()
        self._waits = self._closed = False  # one to be loaded, for others to be idle

    def start(self, make: Callable[[], Scheduler], measure: Measure | None = None) -> Pair:
        """Load the first one on the thread that will decode; raises as its `load`.

        measure: done for each that is loaded, while nothing else is to do.
        """
        self._measure, first = measure, self._all[0]
        pair = self._worker.call(first.load).result()
        self._worker.serve(make).result()
        self._take_in(first, pair)
        return pair

    async def take(self, name: str) -> Pair:
        """The pair of this name, which stays in memory until `leave` and while it answers.

        Raises as its `load`, and DFlashError where there is no room or the load takes very long. If
        whoever waits for it is cancelled, it is loaded all the same.
        """
        wanted = self.by_name[name]
        while self._waits and wanted.pair is not None:
            await asyncio.sleep(_AGAIN)
        wanted.users += 1
        try:
            while wanted.pair is None:
                if self._closed:
                    raise DFlashError("the program is ending", "ask again when it is back")
                if wanted.is_late:
                    what = f"{wanted.names[0]} has been loading for more than {PATIENCE:.0f} s"
                    raise DFlashError(what, "ask again later, or check its disk")
                wanted.loading = wanted.loading or asyncio.ensure_future(self._load(wanted))
                await asyncio.wait([wanted.loading], timeout=_SOON)
                if wanted.problem is not None:
                    raise wanted.problem
        except BaseException:
            self.leave(name)
            raise
        return wanted.pair

    def leave(self, name: str) -> None:
        """As often as it was taken."""
        self.by_name[name].users -= 1
        self.by_name[name].used = time.monotonic()

    async def unload_idle(
        self, minutes: float | None, failed: Callable[[Exception], object]
    ) -> None:
        """Unload what nobody has used for so long, never for None; runs until it is cancelled.

        failed: hears why something could not be unloaded.
        """
        seconds = 60 * (minutes or float("inf"))
        while True:
            await asyncio.sleep(min(seconds / 4, _LOOK))
            unloads = [partial(self._unload_after, seconds, each) for each in self._all]
            looks: list[Callable[[], Awaitable[None]]] = [*unloads, self._relieve]
            for look in looks:
                try:
                    async with self._turn:
                        await look()
                except Exception as error:
                    failed(error)

    async def _relieve(self) -> None:
        """Where memory is short, let idle models go but the last, then what is kept beside them.

        Of the caches kept prefixes go first; then earlier texts; then answers wait.
        """
        if not is_short():
            return
        loaded = sorted((each for each in self._all if each.pair), key=lambda each: each.used)
        idle = [each for each in loaded[:-1] if not self._is_busy(each)]
        await (self._unload(idle[0]) if idle else self._share_memory())
        if not idle and is_short():
            self.spare()

    async def _unload_after(self, seconds: float, each: Model) -> None:
        if self._is_busy(each):
            each.used = time.monotonic()
        elif each.pair is not None and time.monotonic() - each.used > seconds:
            await self._unload(each)

    def close(self) -> None:
        """Nothing is loaded any more, and whoever waits for that is refused."""
        self._closed = True
        self._loader.shutdown(wait=False, cancel_futures=True)
        for each in self._all:
            if each.loading is not None:
                each.loading.cancel()

    def _is_busy(self, each: Model) -> bool:
        return each.users > 0 or (each.pair is not None and self._answers(each.pair))

    async def _load(self, wanted: Model) -> None:
        wanted.problem, loop = None, asyncio.get_running_loop()
        try:
            async with self._turn:
                await self._make_room(wanted)
                load = loop.run_in_executor(self._loader, wanted.load)
                await asyncio.wait([load], timeout=PATIENCE)
                wanted.is_late = not load.done()
            pair = await load
            if wanted.is_late:
                async with self._turn:
                    await self._unload_others(0)
            self._take_in(wanted, pair)
            await self._share_memory()
        except Exception as error:
            wanted.problem = error
        finally:
            wanted.loading, wanted.is_late = None, False

    def _take_in(self, each: Model, pair: Pair) -> None:
        each.pair, each.used = pair, time.monotonic()
        if (measure := self._measure) is not None:
            each.measuring = self._worker.run(lambda job: measure(pair), idle=True)

    async def _make_room(self, wanted: Model) -> None:
        """Unload others until it fits beside the rest; DFlashError where it does not even alone."""
        _check_room(wanted, mx.get_active_memory() + mx.get_cache_memory())
        late = sum(each.needs for each in self._all if each.is_late)
        await self._unload_others(wanted.needs + late)
        _check_room(wanted)

    async def _unload_others(self, needs: int) -> None:
        """Unload the least used, until one more may be loaded and these bytes are free."""
        try:
            while loaded := [each for each in self._all if each.pair is not None]:
                if len(loaded) < self._most and needs <= free_memory():
                    return
                if idle := [each for each in loaded if not self._is_busy(each)]:
                    await self._unload(min(idle, key=lambda each: each.used))
                else:
                    self._waits = True
                    await asyncio.sleep(_AGAIN)
        finally:
            self._waits = False

    async def _unload(self, each: Model) -> None:
        """Let it go, its prefixes one by one, so that others' passes come in between."""
        pair, each.pair, job, each.measuring = each.pair, None, each.measuring, None
        assert pair is not None
        if job is not None:
            self._worker.withdraw(job)
        forget = partial(Scheduler.forget, target=pair.target)
        while not await asyncio.wrap_future(self._worker.ask(forget)):
            pass
        del pair, job, forget
        # A pair is held by cycles, as its layers know of it, and would stay until Python looks.
        await asyncio.wrap_future(self._worker.call(gc.collect))
        await self._share_memory()

    async def _share_memory(self) -> None:
        """Caches get what the models leave; what was unloaded goes back to the machine."""

        def share(scheduler: Scheduler) -> None:
            mx.clear_cache()
            held = scheduler.used + (scheduler.prefixes.nbytes if scheduler.prefixes else 0)
            scheduler.memory.limit = self._memory(held)
            scheduler.make_room()

        await asyncio.wrap_future(self._worker.ask(share))


def _check_room(wanted: Model, used: int = 0) -> None:
    """DFlashError for a model that needs more than is free, and these bytes of others."""
    if wanted.needs > (most := free_memory() + used):
        has = f"needs about {amount(wanted.needs)} of memory, and {amount(most)} are available"
        raise DFlashError(f"{wanted.names[0]} {has}", "ask for a smaller model")
