"""A server on a port of its own, and a model that says what a test wants."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import load as load_tokenizer

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.continuations.store import Stores
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.serve.errors import ApiError
from dflash_mlx.serve.request_queue import RequestQueue
from dflash_mlx.serve.running import serve
from dflash_mlx.serve.service import Service
from dflash_mlx.serve.settings import ServeConfig
from dflash_mlx.session.models import Model, Models
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.pass_times import PassTimes
from support.models import EOS, write_tokenizer
from support.toys import ToyCache, ToyTarget

ROOT = Path(__file__).parents[2]
MODEL = "actor"
CHAT, TEXTS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
# One for all tests: a context for TLS takes longer to make than an answer.
CLIENT = httpx.Client(timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
USUAL = DecodeConfig("none", max_tokens=200)
ROLE = "[assistant]"
# Shows all that a conversation has; <tool_call> and tool_call.name tell mlx-lm which parser it is.
TEMPLATE = (
    "{% if tools %}[tools]{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for tool_call in m.tool_calls or [] %}"
    "<tool_call>{{ (tool_call.function or tool_call.name).name }}</tool_call>{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    + ROLE
    + "{% if enable_thinking %}<think>{% endif %}{% endif %}"
)

WORDS = "Once upon a time there was an answer."
THOUGHT = "<think>\nLet me see.</think>\n\nIt is blue."
COUNT = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": COUNT}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "2"}}</tool_call>'

Act = Callable[[str], str]


def speak(prompt: str) -> str:
    """What is said to a conversation, by its last words and the tools that it may use."""
    said, tools = prompt.rpartition("[user]")[2], "[tools]add" in prompt
    if "[tool]3" in prompt:
        return "It is 3."
    called = {"two": f"First.\n{CALL}\n{CALL}"}.get(said, f"Let me see.{CALL}")
    return called if tools else {"think": THOUGHT, "": ""}.get(said, WORDS)


class Actor(ToyTarget):
    """Answers a conversation, as the template above writes it, with what `act` makes of it.

    Every other token is so unlikely that it is not even drawn at any temperature.
    """

    name, pass_times, noise = MODEL, PassTimes((1, 96), (1.0, 1.5)), None
    vocab_size = 97

    def __init__(self, tokenizer: Any, act: Act, context_length: int = 4000) -> None:
        self.context_length, self.passes = context_length, 0
        self.gate = threading.Event()  # where it is not set, passes wait
        self.gate.set()
        self._tokenizer, self._act = tokenizer, act

    def forward(
        self, tokens: mx.array, cache: ToyCache, block: Block, aux_layers: tuple[int, ...] = ()
    ) -> tuple[mx.array, None]:
        assert self.gate.wait(30)
        self.passes += 1
        cache.pending = tokens.tolist()
        parents = block.tree.parents if block.tree is not None else range(-1, block.rows - 1)
        paths: list[list[int]] = []
        for token, parent in zip(cache.pending, parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else cache.tokens), token])
        paths = paths[-1:] if block.last_only else paths
        return mx.array(np.stack([self._row(path) for path in paths])), None

    def _row(self, path: list[int]) -> np.ndarray:
        before, begun, said = self._tokenizer.decode(path).rpartition(ROLE)
        row = np.zeros(self.vocab_size, np.float32)
        if not begun:  # a part of a prompt
            return row
        answer = self._act(before)
        said = said if answer.startswith("<think>") else said.removeprefix("<think>")
        row[self._tokenizer.encode(answer[len(said)])[0] if len(said) < len(answer) else EOS] = 60
        return row


@cache
def _tokenizer(template: str | None) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), template)
        return load_tokenizer(Path(folder))


def actor_pair(act: Act, template: str | None = TEMPLATE, **more: Any) -> Pair:
    tokenizer = _tokenizer(template)
    return Pair(Actor(tokenizer, act, **more), tokenizer)


class Server:
    """What runs on a thread of its own, at `url`."""

    def __init__(
        self,
        pair: Pair,
        config: ServeConfig,
        usual: DecodeConfig,
        model: str,
        further: Sequence[Model] = (),
    ) -> None:
        self.pair, self.faults = pair, []
        self.queue = RequestQueue(config, self._fault)
        self.worker = self.queue.worker
        served = [Model((model, *config.name), lambda: pair), *further]
        most = config.most_loaded
        self.models = Models(served, self.worker, self.queue.answers, lambda held: None, most)
        make = partial(Scheduler, most=config.parallel)
        self.models.start(lambda: make(prefixes=PrefixCache(10**8)))
        self.service = Service(self.models, usual, config, self.queue, Stores())
        self.place = socket.create_server(("127.0.0.1", 0))
        self.port = self.place.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.loop, self.ends = asyncio.new_event_loop(), asyncio.Queue()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _fault(self, error: Exception) -> ApiError:
        self.faults.append(error)
        print(f"fault: {error!r}")
        return ApiError(500, f"fault: {error!r}")

    def _run(self) -> None:
        self.loop.run_until_complete(serve(self.service, self.place, self.ends))
        self.loop.close()

    def end(self) -> None:
        """As a signal to end."""
        with suppress(RuntimeError):  # it has ended before
            self.loop.call_soon_threadsafe(self.ends.put_nowait, None)

    def until(self, holds: Callable[[], bool], seconds: float = 20.0) -> None:
        """Return when something holds; the event loop looks after every turn."""

        async def look() -> None:
            while not holds():
                await asyncio.sleep(0.001)

        waiting = asyncio.run_coroutine_threadsafe(asyncio.wait_for(look(), seconds), self.loop)
        waiting.result()

    def get(self, path: str, method: str = "GET", **more: Any) -> httpx.Response:
        return CLIENT.request(method, self.url + path, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **more.pop("headers", {})}
        return self.get(path, "POST", content=content, headers=headers, **more)

    def chat(self, text: str = "hello", **more: Any) -> httpx.Response:
        return self.post(CHAT, chat_body(text, **more))

    def message(self, text: str = "hello", **more: Any) -> httpx.Response:
        return self.post(MESSAGES, message_body(text, **more))

    @contextmanager
    def streaming(self, path: str, body: Any) -> Iterator[Iterator[str]]:
        """The lines of a stream that has begun, the empty ones left out."""
        with CLIENT.stream("POST", self.url + path, json={**body, "stream": True}) as response:
            yield filter(None, response.iter_lines())


@contextmanager
def serving(
    pair: Pair | Act,
    usual: DecodeConfig = USUAL,
    model: str = MODEL,
    faults: bool = False,
    further: Sequence[Model] = (),
    **config: Any,
) -> Iterator[Server]:
    """A server that ends with the block; no fault of ours may have happened meanwhile."""
    pair = pair if isinstance(pair, Pair) else actor_pair(pair)
    server = Server(pair, ServeConfig(**{"grace": 5.0, **config}), usual, model, further)
    try:
        yield server
        assert faults or not server.faults
    finally:
        server.end()
        server.thread.join(20)
        assert server.worker.close(20)
        server.service.close()
        assert not server.thread.is_alive()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def said(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["message"]["content"])


def chat_body(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": user(text), **more}


def message_body(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {**chat_body(text), "max_tokens": 300, **more}


def ask(client: Any, text: str = "hello", **more: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=user(text), **more)


def spawn(
    model: Path,
    folder: Path,
    *argv: str,
    run: Sequence[str] = ("-m", "dflash_mlx.serve"),
    stdout: int | None = None,
) -> subprocess.Popen[str]:
    """`dflash-serve` without drafts in a process of its own, whose files are in `folder`."""
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    path = os.pathsep.join(map(str, (ROOT, *filter(None, sys.path))))
    words = [*run, "--model", str(model), "--method", "none", "--port", "0", *argv]
    return subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **own, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path},
    )


@contextmanager
def command_of(
    model: Path, folder: Path, *argv: str, **how: Sequence[str]
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that listens, and the address that it says; killed in the end."""
    running = spawn(model, folder, *argv, **how)
    try:
        assert running.stderr is not None
        said = ""
        while not (found := re.search(r"http://\S+:\d+", said)):
            line = running.stderr.readline()
            assert line, said
            said += line
        yield running, found[0]
    finally:
        running.kill()
        running.wait(20)
