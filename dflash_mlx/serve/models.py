"""The models that are served: loaded when asked for, unloaded when others need their memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from dflash_mlx.cli.options import say
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import amount
from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.chat import Json
from dflash_mlx.serve.errors import ApiError
from dflash_mlx.serve.request_queue import RequestQueue
from dflash_mlx.serve.settings import ServeConfig
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.worker import Job
from dflash_mlx.system.machine import free_memory

_AGAIN, _LOOK = 0.05, 10.0  # seconds until it is looked again for room, and for idle models


@dataclass(eq=False)
class Served:
    """A model, and its pair while that is in memory."""

    names: tuple[str, ...]  # its own first
    load: Callable[[], Pair] = field(repr=False)
    needs: int = 0  # bytes of memory, 0 where that is unknown
    pair: Pair | None = field(default=None, repr=False)
    facts: Json = field(default_factory=dict)  # that clients were told when it was loaded
    users: int = 0  # requests that wait for it, or whose prompts are made
    used: float = 0.0  # when it last was, by time.monotonic()
    loading: asyncio.Future[None] | None = None
    problem: ApiError | None = None  # of the last load
    measuring: Job | None = field(default=None, repr=False)


class Models:
    """Loads one at a time, on a thread of its own while others' answers stream on.

    It takes the place of those that were used least recently, never of one that is answering: if
    all are, it waits, and so do further requests for them, or its turn would never come.
    """

    def __init__(
        self,
        served: Sequence[Served],
        queue: RequestQueue,
        config: ServeConfig,
        measure: Callable[[Pair], Generator[object, None, None]] | None = None,
    ) -> None:
        self.served = {name: each for each in served for name in each.names}
        self._all, self._queue, self._config = [*served], queue, config
        self._measure = measure  # done for each that is loaded, while nothing else is to do
        self._loader = ThreadPoolExecutor(1, "loader")
        self._turn = asyncio.Lock()
        self._waits = False  # one that is to be loaded, for others to be idle

    def start(self, make: Callable[[], Scheduler]) -> Pair:
        """Load the first one on the thread that will decode; raises as its `load`."""
        first, worker = self._all[0], self._queue.worker
        pair = first.pair or worker.call(first.load).result()
        worker.serve(make).result()
        self._take_in(first, pair)
        return pair

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Pair]:
        """The pair of this name, which stays in memory inside of the block and while it answers.

        ApiError where it cannot be loaded; if a client leaves meanwhile, it is loaded all the same.
        """
        wanted = self.served[name]
        while self._waits and wanted.pair is not None:
            with self._queue.preparing():
                await asyncio.sleep(_AGAIN)
        wanted.users += 1
        try:
            while (pair := wanted.pair) is None:
                with self._queue.preparing():
                    wanted.loading = wanted.loading or asyncio.ensure_future(self._load(wanted))
                    await asyncio.wait([wanted.loading])
                if wanted.problem is not None:
                    raise wanted.problem
            yield pair
        finally:
            wanted.users -= 1
            wanted.used = time.monotonic()

    async def unload_idle(self) -> None:
        """Unload what nobody has asked for in a while, for as long as this runs."""
        seconds = 60 * (self._config.idle_unload or float("inf"))
        while True:
            await asyncio.sleep(min(seconds / 4, _LOOK))
            for each in self._all:
                async with self._turn:
                    if self._is_busy(each):
                        each.used = time.monotonic()
                    elif each.pair is not None and time.monotonic() - each.used > seconds:
                        await self._unload(each)

    def close(self) -> None:
        """Whoever waits for a model is refused, once the queue is closed."""
        self._loader.shutdown(wait=False, cancel_futures=True)
        for each in self._all:
            if each.loading is not None:
                each.loading.cancel()

    def _is_busy(self, each: Served) -> bool:
        return each.users > 0 or (each.pair is not None and self._queue.answers(each.pair))

    async def _load(self, wanted: Served) -> None:
        wanted.problem, loop = None, asyncio.get_running_loop()
        try:
            async with self._turn:
                await self._make_room(wanted)
                pair = await loop.run_in_executor(self._loader, wanted.load)
                self._take_in(wanted, pair)
                await self._share_memory()
        except DFlashError as error:
            say(f"{wanted.names[0]} cannot be loaded: {error}")  # with folders, which are not told
            what = f"the model {wanted.names[0]!r} cannot be loaded; the server's terminal says why"
            wanted.problem = ApiError(503, what)
        except Exception as error:
            wanted.problem = self._queue.as_api_error(error)
        finally:
            wanted.loading = None

    def _take_in(self, each: Served, pair: Pair) -> None:
        each.pair, each.used = pair, time.monotonic()
        if (measure := self._measure) is not None:
            each.measuring = self._queue.worker.run(lambda job: measure(pair), idle=True)

    async def _make_room(self, wanted: Served) -> None:
        """Unload others until it fits beside the rest; ApiError where it does not even alone."""
        most = self._config.most_loaded or len(self._all)
        try:
            while loaded := [each for each in self._all if each.pair is not None]:
                if len(loaded) < most and wanted.needs <= free_memory():
                    return
                if idle := [each for each in loaded if not self._is_busy(each)]:
                    await self._unload(min(idle, key=lambda each: each.used))
                else:
                    self._waits = True
                    await asyncio.sleep(_AGAIN)
        finally:
            self._waits = False
        if wanted.needs > (free := free_memory()):
            has = f"needs about {amount(wanted.needs)} of memory, and {amount(free)} are available"
            raise ApiError(503, f"the model {wanted.names[0]!r} {has}; ask for a smaller one")

    async def _unload(self, each: Served) -> None:
        """Let it go, its prefixes one by one, so that others' passes come in between."""
        pair, each.pair, job, each.measuring = each.pair, None, each.measuring, None
        assert pair is not None
        if job is not None:
            self._queue.worker.withdraw(job)
        forget = partial(Scheduler.forget, target=pair.target)
        while not await asyncio.wrap_future(self._queue.worker.ask(forget)):
            pass
        del pair, job, forget
        await self._share_memory()

    async def _share_memory(self) -> None:
        """Caches get what the models leave; what was unloaded goes back to the machine."""

        def share(scheduler: Scheduler) -> None:
            mx.clear_cache()
            held = scheduler.used + (scheduler.prefixes.nbytes if scheduler.prefixes else 0)
            scheduler.memory.limit = memory_for(self._config, held)

        await asyncio.wrap_future(self._queue.worker.ask(share))


def memory_for(config: ServeConfig, held: int = 0) -> int:
    """Bytes for the caches of all answers, beside the models that are loaded. held: by caches."""
    return (free_memory() + held) // 2 if config.memory_gb is None else int(config.memory_gb * 1e9)
