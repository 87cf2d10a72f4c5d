"""A server from the loaded pair to its end: listening, signals, draining."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial

import uvicorn
from huggingface_hub import constants

from dflash_mlx.benchmark.quick import comparing
from dflash_mlx.cli import options as cli
from dflash_mlx.cli.launch import url_of
from dflash_mlx.core.config import PLAIN, DecodeConfig, PrefixConfig
from dflash_mlx.core.text import amount, counted
from dflash_mlx.drafters.methods import settle
from dflash_mlx.engine.pair import Pair
from dflash_mlx.ranks import end_if_lost, launched
from dflash_mlx.serve.app import make_app
from dflash_mlx.serve.errors import ApiError
from dflash_mlx.serve.guard import LimitedProtocol
from dflash_mlx.serve.request_queue import RequestQueue
from dflash_mlx.serve.service import Service
from dflash_mlx.serve.settings import ServeConfig
from dflash_mlx.session.memory import for_caches
from dflash_mlx.session.models import Model, Models
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.session import earlier_texts, prefix_cache

PROGRAM = "dflash-serve"
_PAUSE = 2.0  # seconds between lines of --watch
_LATE = 5.0  # seconds after the last answer until connections are cut
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Ends = asyncio.Queue[None]  # asks a server to end; if asked again, it ends at once


def run(
    served: Sequence[Model],
    place: socket.socket,
    config: ServeConfig,
    usual: DecodeConfig,
    kept: PrefixConfig,
) -> None:
    """Load the first model, serve all, and return when all is over.

    kept: how much of what was read stays for later conversations. place: bound, and listened on
    from the moment that everything is ready. Raises as the model's `load`.
    """
    queue = RequestQueue(config, Faults())
    worker = queue.worker
    make = partial(Scheduler, most=config.parallel)
    room = partial(memory_for, config)
    models = Models(served, worker, queue.answers, room, config.most_loaded)
    measure = partial(_measure, usual)
    kept = kept if config.remember else replace(kept, prefix_disk_gb=0)
    pair = models.start(lambda: make(memory=room(), prefixes=prefix_cache(kept)), measure)
    constants.HF_HUB_OFFLINE = True  # no request downloads anything; what they may load is here
    asked = replace(usual, recalibrate=False)  # which is done while nothing is asked
    earlier = earlier_texts(kept, config.remember, len(config.key))
    models.spare = earlier.spare
    service = Service(models, asked, config, queue, earlier)
    memory, window = worker.ask(partial(Scheduler.window, config=usual, pair=pair)).result()
    told = f"{settle(usual, pair.capabilities).method} drafts, {amount(memory)} for caches"
    told += f" (up to {window:,} tokens in one conversation)"
    more = f" and {counted(len(served) - 1, 'other model')}" if len(served) > 1 else ""
    named = f"{served[0].names[0]}{more} at {url_of(*place.getsockname()[:2])}"
    del pair  # which may be unloaded
    asyncio.run(_until_signal(service, place, f"{PROGRAM}: {named}, {told}; Ctrl+C ends it"))
    problems = [worker.ask(lambda each: each.prefixes.save() if each.prefixes else "").result()]
    worker.close(_LATE)
    for problem in filter(None, [*problems, earlier.finish(_LATE)]):
        cli.say(f"{PROGRAM}: {problem}")
    service.close()


def _measure(usual: DecodeConfig, pair: Pair) -> Generator[object, None, None]:
    """While nothing is asked; until then a budget learns from its rounds."""
    if settle(usual, pair.capabilities).method == PLAIN:
        return
    again = usual.recalibrate
    yield from pair.calibrating(again)
    for said in comparing(pair, again):
        if isinstance(said, str):
            cli.say(f"{PROGRAM}: {said}")
        yield said


def memory_for(config: ServeConfig, held: int = 0) -> int:
    """Bytes for the caches of all answers, beside what is loaded. held: what caches have now."""
    return for_caches(held) if config.memory_gb is None else int(config.memory_gb * 1e9)


async def _until_signal(service: Service, place: socket.socket, told: str) -> None:
    ends: Ends = asyncio.Queue()
    with _signals(ends):
        place.listen(2048)  # the backlog that uvicorn has
        cli.say(told)
        watching = asyncio.ensure_future(_watch(service)) if service.config.watch else None
        await serve(service, place, ends)
        if watching is not None:
            watching.cancel()


async def _watch(service: Service) -> None:
    """Tell what it is doing, while it does anything."""
    while True:
        await asyncio.sleep(_PAUSE)
        if told := service.queue.metrics.line(_PAUSE):
            cli.say(told)


async def serve(service: Service, place: socket.socket, ends: Ends) -> None:
    """Serve until it is asked to end, then let answers finish, unless it is asked again."""
    config = service.config
    protocol = partial(LimitedProtocol, most=config.connections, idle=config.idle)
    settings = uvicorn.Config(
        make_app(service),
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=max(1, round(config.idle)),
        timeout_graceful_shutdown=round(_LATE),
    )
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what matters, we say
    server = uvicorn.Server(settings)
    # Its signal handlers would end answers that ours let finish.
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    server.servers = []  # until it listens
    running = asyncio.ensure_future(server.serve([place]))
    asked, again = (asyncio.ensure_future(ends.get()) for _ in range(2))
    unload = service.models.unload_idle(config.idle_unload, service.queue.fault)
    unloading = asyncio.ensure_future(unload)
    await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        for each in server.servers:
            each.close()  # to new connections; those that are open go on
        draining = asyncio.ensure_future(service.queue.drain(config.grace))
        await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        service.models.close()
        server.force_exit = again.done()
        server.should_exit = True
    await running
    for task in (asked, again, unloading):
        task.cancel()


@contextlib.contextmanager
def _signals(ends: Ends) -> Iterator[None]:
    """Signals ask to end."""
    loop = asyncio.get_running_loop()
    # A rank that waits for another hears nothing; SIGTERM is how a launcher ends it.
    kinds = _SIGNALS[:1] if launched() else _SIGNALS
    before = {each: signal.getsignal(each) for each in kinds}
    for each in kinds:
        loop.add_signal_handler(each, ends.put_nowait, None)
    try:
        yield
    finally:
        for each in kinds:
            loop.remove_signal_handler(each)
            signal.signal(each, before[each])


class Faults:
    """Says of each fault of ours once where its traceback is, and what clients are told."""

    def __init__(self) -> None:
        self._last: Exception | None = None

    def __call__(self, error: Exception) -> ApiError:
        """Note it; what only came of another rank's end is told by that."""
        what = f"something went wrong ({cli.in_short(error)})"
        if error is not self._last:
            self._last = error
            end_if_lost(error)
            cli.say(f"{PROGRAM}: {what}; report it with {cli.keep_traceback(error)}")
        return ApiError(500, what)
