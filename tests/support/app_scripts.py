"""A scripted backend for tests of the chat: answers word by word, no model, no clock."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from types import SimpleNamespace
from typing import Any

from textual import _wait
from textual.pilot import Pilot
from textual.widgets import Markdown, Static

from dflash_chat import listener, runner
from dflash_chat.backend import Loaded
from dflash_chat.chat_app import ChatApp
from dflash_chat.options import ChatConfig
from dflash_chat.speeds import Timing
from dflash_chat.store import Store
from dflash_mlx.client import DecodeConfig, Delta, PairConfig, RaceStep, Statistics
from dflash_mlx.core.tree import Accepted
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.pair import Capabilities
from support.decoding import tree_of

# A pilot takes the app for idle when it computes next to nothing for so long. It waits 20 ms, twice
# for every key; a screen draws itself after 8 at most.
_wait.SLEEP_GRANULARITY, _wait.SLEEP_IDLE = 0.01, 0.0005
# What is offered at the first start depends on the machine.
runner.first_offer, listener.read_speed = (lambda folder, read_speed: None), (lambda: 0.0)

ANSWER = """Two rivers meet **here**:

1. the *Rhine*
2. the Main

```python
def rivers() -> list[str]:
    return ["Rhine", "Main"]
```

That is all."""


class ActiveVocabulary:
    """A tokenizer, and its own detokenizer, that makes a token of every text it is given."""

    def __init__(self):
        self._texts = []

    def token(self, text):
        self._texts.append(text)
        return len(self._texts) - 1

    def decode(self, tokens):
        return "".join(self._texts[token] for token in tokens)

    @property
    def detokenizer(self):
        return self

    def add_token(self, token):
        self.last_segment = self._texts[token]


WORDS = ActiveVocabulary()


def rounds_of(text, prompt=34, reused=0):
    """`text` in rounds of one to four words, with figures that grow by fixed steps."""
    words = [word + " " for word in text.split(" ")]
    words[-1] = words[-1].rstrip(" ")
    rounds = []
    tokens = 0
    while tokens < len(words):
        kept = words[tokens : tokens + 1 + (len(rounds) * 2 + 1) % 4]
        tokens += len(kept)
        reason = "stop" if tokens >= len(words) else None
        statistics = statistics_of(tokens, len(rounds) + 1, prompt, reused)
        accepted, root = round_of(kept)
        proposal = Proposal(accepted.tree, why=lambda: "6 are checked, because 6 pay.")
        delta = Delta("".join(kept), accepted.tokens, accepted, reason, statistics, root, proposal)
        rounds.append(delta)
    return rounds


def round_of(kept):
    """The kept drafts as a path, each with a rejected sibling, and a rejected end."""
    texts, parents, sources, path = [" so"], [-1], [""], [0]
    for i, word in enumerate(kept[:-1]):
        parent = path[-1]
        path.append(len(texts))
        texts += [word, " or"]
        parents += [parent, parent]
        sources += [("first", "first", "second")[i % 3]] * 2
    texts += [" wrong", " end"]
    parents += [path[-1], len(texts) - 2]
    tree = tree_of([WORDS.token(text) for text in texts], parents)
    tree = replace(tree, sources=(*sources, "first", "first"))
    root = WORDS.token(" so")
    return Accepted(tree, tuple(path), WORDS.token(kept[-1])), root


class Fixed(Statistics):
    """Without what differs from one machine to the next."""

    def as_dict(self):
        return {**super().as_dict(), "peak_memory_bytes": 1_200_000_000}


def statistics_of(tokens, rounds, prompt, reused):
    return Fixed(
        method="d2sd",
        prompt_tokens=prompt,
        reused_tokens=reused,
        generated_tokens=tokens,
        rounds=rounds,
        prefill_seconds=0.25,
        time_to_first_token=0.31,
        decode_seconds=(tokens - 1) / 40,
        plain_seconds=(tokens - 1) / 20,
        drafted=Counter({1: 440, 2: 100, 3: 100, 4: 100, 5: 100}),
        accepted=Counter({1: 352, 2: 60, 3: 50, 4: 30, 5: 20}),
    )


def pair_of(name="M", capabilities=None, fallback="", advised=None):
    """What the chat reads of a loaded pair."""
    target = SimpleNamespace(name=name, context_length=8192)
    capabilities = capabilities or Capabilities(("dflash",) * 2)
    return SimpleNamespace(
        target=target,
        capabilities=capabilities,
        fallback=fallback,
        notes=(),
        tokenizer=WORDS,
        advised=advised or {},
    )


@dataclass
class ScriptedBackend:
    """Answers with `answers` in turn. Whatever is an exception is raised instead.

    gate: opened once per round, so a test decides how far an answer is; None lets all through.
    prefills: what it says of prefill; after each it waits for `held`. waits: the job, "load" or
    "measure", that waits for `held` too.
    """

    answers: list[Any] = field(default_factory=lambda: [ANSWER])
    loads: list[Any] = field(default_factory=list)
    race_steps: list[Any] = field(default_factory=list)
    gate: threading.Semaphore | None = None
    prefills: list[tuple[int, int]] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    waits: str = ""
    requests: list[Any] = field(default_factory=list)
    private: list[bool] = field(default_factory=list)  # of every answer
    loaded: list[PairConfig] = field(default_factory=list)
    capabilities: Capabilities = Capabilities(("dflash",) * 2)
    fallback: str = ""
    advised: dict[str, Any] = field(default_factory=dict)
    rounds_run: int = 0
    forgotten: int = 0

    @property
    def asked(self):
        """The last question of every request."""
        return [request.messages[-1]["content"] for request in self.requests]

    def hold(self, rounds):
        """Let so many rounds through from now on."""
        self.gate = threading.Semaphore(rounds)

    def load(self, config):
        self._wait_in("load")
        self.loaded.append(config)
        result = self.loads.pop(0) if self.loads else None
        if isinstance(result, BaseException):
            raise result
        name = config.model or "SmolLM2-135M-Instruct"
        yield Loaded(pair_of(name, self.capabilities, self.fallback, self.advised))

    def measure(self, again):
        self._wait_in("measure")
        yield Timing()

    def answer(self, request, observer, private=False):
        self.requests.append(request)
        self.private.append(private)
        result = self.answers[(len(self.requests) - 1) % len(self.answers)]
        if isinstance(result, BaseException):
            raise result
        prompt = sum(len(m["content"].split()) + 10 for m in request.messages)
        last = len(request.messages[-1]["content"].split()) + 10
        for tokens, total in self.prefills:
            observer.prefilled(tokens, total)
            self.held.wait(60)
        observer.prefilled(prompt - last, prompt)
        rounds = rounds_of(result, prompt, prompt - last) if isinstance(result, str) else result
        for done in self._through_the_gate(rounds):
            self.rounds_run += 1
            yield done

    def race(self, request):
        self.requests.append(request)
        yield from self._through_the_gate(self.race_steps)

    def forget(self):
        self.forgotten += 1
        yield from ()

    def leave(self):
        pass

    def _wait_in(self, job):
        if self.waits == job:
            self.held.wait(60)

    def _through_the_gate(self, events):
        for event in events:
            if self.gate is not None:
                self.gate.acquire()
            if isinstance(event, BaseException):
                raise event
            yield event


def gated(rounds, **more):
    """A backend that lets so many rounds through, until it is told to go on."""
    return ScriptedBackend(gate=threading.Semaphore(rounds), **more)


def fill_disk(monkeypatch):
    """Nothing can be written any more, until the patch is undone."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)


def race_of(text, tokens):
    """Both sides take turns; the drafted one is twice as fast."""
    words = [word + " " for word in text.split(" ")][:tokens]
    steps = []
    for i, word in enumerate(words, start=1):
        for side, speed in (("drafted", 40), ("plain", 20)):
            steps.append(RaceStep(side, word, i, i / speed, i == len(words)))
    return steps


async def until(condition, pilot, most=60.0):
    """Let the app run until `condition` holds; AssertionError after `most` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + most
    while not condition():
        assert loop.time() < end, "the app did not get there"
        await pilot.pause(0.01)
    await pilot.pause()


class Chat(Pilot):
    """A user of a running chat: types, waits, and reads the screen."""

    def __init__(self, app, backend=None):
        super().__init__(app)
        self.backend = backend

    @property
    def text(self):
        """What is on screen, line by line."""
        lines = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in lines)

    @property
    def notices(self):
        return [str(notice.render()) for notice in self.app.query(".notice").results(Static)]

    @property
    def saved(self):
        """The turns of the conversation on screen, as they are on disk."""
        store, talk = Store(self.app.store.folder), self.app.conversation
        file = store.file_of(talk)
        return store.read(file).conversation.turns if file.exists() else []

    @property
    def shown_answer(self):
        return self.app.query(Markdown).last().source

    async def until(self, condition):
        await until(condition, self)

    async def shows(self, text):
        """Wait until a text is on screen."""
        await self.until(lambda: text in self.text)

    async def say(self, text):
        self.app.prompt.text = text
        await self.press("enter")
        await self.pause()

    async def is_over(self):
        """Wait until nothing is being answered."""
        await self.until(lambda: self.app.listener.job is None)

    async def answered(self, text="What meets?"):
        """Ask and wait for the whole answer."""
        app, whole = self.app, len(self.app.conversation.turns) + 2
        await self.say(text)
        await self.until(lambda: app.listener.job is None and len(app.conversation.turns) == whole)

    async def begun(self, first, *others):
        """Ask, wait for the first words of the answer, and ask what has to wait behind it."""
        await self.say(first)
        await self.until(lambda: self.app.status.figures)
        for question in others:
            await self.say(question)

    async def reaches(self, rounds):
        """Wait until so many rounds of the answer are counted on screen."""
        status = self.app.status
        await self.until(lambda: status.figures and status.figures["rounds"] == rounds)

    async def goes_on(self):
        """Let everything through, and wait until nothing is being answered."""
        self.backend.held.set()
        if self.backend.gate is not None:
            self.backend.gate.release(1000)
        await self.is_over()


def drive(steps, folder, backend=None, size=(100, 30), decode=None, first="", **chat):
    """Run `steps` on a loaded app; nothing may have gone wrong inside.

    steps: takes chat, app and backend, or those of them that it needs. first: the question of the
    command line.
    """

    async def run():
        used = backend or ScriptedBackend()
        config = replace(ChatConfig(conversations=folder), **chat)
        app = ChatApp(PairConfig(), decode or DecodeConfig("d2sd"), config, used)
        app.first = first
        async with app.run_test(size=size):
            user = Chat(app, used)
            await user.until(lambda: used.waits or not app.listener.waiting)
            assert await app.keeper.finish(60)
            await user.pause()
            given = {"chat": user, "app": app, "backend": used}
            await steps(**{n: given[n] for n in signature(steps).parameters if n in given})
            await user.pause()
        assert app.return_code in (0, None)
        assert app.clean

    asyncio.run(run())


def in_chat(make=lambda: ScriptedBackend(), size=(100, 30), **chat):
    """Makes a test of steps(chat, app, backend, *fixtures), of which it takes what it needs.

    make: the backend, for each run of the test; its arguments are fixtures, too.
    """

    def decorate(steps):
        own, needed = ("chat", "app", "backend"), [*signature(make).parameters]
        asked = [name for name in signature(steps).parameters if name not in own]
        names = dict.fromkeys([*asked, *needed, "tmp_path"])

        @wraps(steps)
        def test(**fixtures):
            given = {name: fixtures[name] for name in asked}
            backend = make(*(fixtures[name] for name in needed))
            drive(partial(steps, **given), fixtures["tmp_path"] / "talks", backend, size, **chat)

        test.__signature__ = Signature([Parameter(n, Parameter.KEYWORD_ONLY) for n in names])
        return test

    return decorate
