"""What every endpoint has at hand: the loaded pair, its names, and the way to an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.fields import unknown_model
from dflash_mlx.serve.metrics import Metrics
from dflash_mlx.serve.prompts import Chat, Prompt, render
from dflash_mlx.serve.request_queue import RequestQueue, ResponseStream
from dflash_mlx.serve.settings import ServeConfig
from dflash_mlx.session.worker import Request

T = TypeVar("T")


@dataclass
class Service:
    """A pair that is served.

    usual: how answers are decoded where a request does not say. names: the model's, its own first.
    """

    pair: Pair
    usual: DecodeConfig
    config: ServeConfig
    queue: RequestQueue
    metrics: Metrics
    names: tuple[str, ...]
    started: int = field(default_factory=lambda: int(time.time()))
    _readers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "prompts"), repr=False
    )

    def check_model(self, name: str) -> None:
        """ApiError for a model that is not served."""
        if name not in self.names:
            raise unknown_model(name, self.names)

    async def prepare(self, work: Callable[[], T]) -> T:
        """Do what may take long, as rendering a long prompt, while answers stream on."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def read(self, chat: Chat) -> Prompt:
        """The prompt of a conversation."""
        return await self.prepare(lambda: render(self.pair, chat))

    async def ask(
        self, prompts: Sequence[Prompt], configs: Sequence[DecodeConfig], tops: int | None
    ) -> ResponseStream:
        """Ask for an answer to each of `prompts` with each of `configs`; return when all are in.

        tops: likeliest tokens to tell with each token, None for no log-probabilities. ApiError for
        what cannot be answered.
        """
        told = [replace(config, logprobs=tops) for config in configs]
        asked: list[Request] = []
        for each in prompts:
            first = Request(each.tokens, told[0])
            others = [Request(each.tokens, config, first) for config in told[1:]]
            asked += [first, *others]
        ticket = self.queue.open(asked)
        try:
            await ticket.begun()
        except BaseException:  # whatever ends the request, nobody reads these answers
            ticket.close()
            raise
        return ticket

    def close(self) -> None:
        """End the thread that reads prompts."""
        self._readers.shutdown(wait=False, cancel_futures=True)
