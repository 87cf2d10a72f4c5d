"""A scripted engine for tests of the chat: answers word by word, no model, no clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from textual.widgets import Markdown, Static

from dflash_chat.chat_app import ChatApp, Start
from dflash_chat.engine import OnPrefilled, Question
from dflash_chat.figures import Figures
from dflash_chat.messages import DRAFTED, PLAIN, ModelInfo, RaceStep, Round, Verdict
from dflash_chat.options import ChatConfig
from dflash_chat.tree_view import FIRST, SECOND, TARGET, DrawnTree, Piece
from dflash_mlx import DecodeConfig, PairConfig
from dflash_mlx.engine.pair import Means

CONTEXT = 8192
ANSWER = """Two rivers meet **here**:

1. the *Rhine*
2. the Main

```python
def rivers() -> list[str]:
    return ["Rhine", "Main"]
```

That is all."""


def rounds_of(text: str, prompt: int = 34, reused: int = 0) -> list[Round]:
    """`text` in rounds of one to four words, with figures that grow by fixed steps."""
    words = [word + " " for word in text.split(" ")]
    words[-1] = words[-1].rstrip(" ")
    rounds: list[Round] = []
    tokens = at = 0
    while at < len(words):
        size = 1 + (len(rounds) * 2 + 1) % 4
        kept = words[at : at + size]
        at += size
        tokens += len(kept)
        origins = [(FIRST, FIRST, SECOND)[i % 3] for i in range(len(kept) - 1)] + [TARGET]
        pieces = tuple(Piece(w, o) for w, o in zip(kept, origins, strict=True))
        rounds.append(
            Round(
                "".join(kept),
                pieces,
                tree_of(kept),
                figures_of(tokens, len(rounds) + 1, prompt, reused),
                "stop" if at >= len(words) else None,
            )
        )
    return rounds


def tree_of(kept: Sequence[str]) -> DrawnTree:
    """The kept drafts as a path, each with a rejected sibling, and a rejected end."""
    texts, parents, path = [" so"], [-1], [0]
    for word in kept[:-1]:
        parent = path[-1]
        texts += [word, " or"]
        parents += [parent, parent]
        path.append(len(texts) - 2)
    texts += [" wrong", " end"]
    parents += [path[-1], len(texts) - 2]
    return DrawnTree(tuple(texts), tuple(parents), tuple(path), kept[-1], "tree of 6 pays")


def figures_of(tokens: int, rounds: int, prompt: int, reused: int) -> Figures:
    return Figures(
        method="d2sd",
        prompt_tokens=prompt,
        reused_tokens=reused,
        generated_tokens=tokens,
        rounds=rounds,
        prefill_seconds=0.25,
        time_to_first_token=0.31,
        decode_seconds=tokens / 40,
        tokens_per_second=40.0,
        mean_accepted=tokens / rounds,
        acceptance_rate=0.61,
        accepted_by_position=(0.8, 0.6, 0.5, 0.3, 0.2),
        peak_memory_bytes=1_200_000_000,
        context_length=CONTEXT,
    )


@dataclass
class ScriptedBackend:
    """Answers with `answers` in turn. Whatever is an exception is raised instead.

    gate: opened once per round, so a test decides how far an answer is; None lets all through.
    prefills: what it says of prefill; after each it waits for `held`.
    """

    answers: list[Any] = field(default_factory=lambda: [ANSWER])
    loads: list[Any] = field(default_factory=list)
    race_steps: list[RaceStep | Verdict | Exception] = field(default_factory=list)
    gate: threading.Semaphore | None = None
    prefills: list[tuple[int, int]] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    questions: list[Question] = field(default_factory=list)
    loaded: list[PairConfig] = field(default_factory=list)
    means: Means = Means(2)
    fallback: str = ""
    rounds_run: int = 0

    def load(self, config: PairConfig) -> ModelInfo:
        self.loaded.append(config)
        result = self.loads.pop(0) if self.loads else None
        if isinstance(result, BaseException):
            raise result
        name = config.model or "SmolLM2-135M-Instruct"
        return ModelInfo(name, CONTEXT, self.means, self.fallback)

    def plain_seconds(self) -> float | None:
        return 0.05

    def answer(self, question: Question, prefilled: OnPrefilled) -> Iterator[Round]:
        self.questions.append(question)
        result = self.answers[(len(self.questions) - 1) % len(self.answers)]
        if isinstance(result, BaseException):
            raise result
        prompt = sum(len(m["content"].split()) + 10 for m in question.messages)
        last = len(question.messages[-1]["content"].split()) + 10
        for tokens, total in self.prefills:
            prefilled(tokens, total)
            self.held.wait(60)
        prefilled(prompt - last, prompt)
        rounds = rounds_of(result, prompt, prompt - last) if isinstance(result, str) else result
        for done in rounds:
            if self.gate is not None:
                self.gate.acquire()
            if isinstance(done, BaseException):
                raise done
            self.rounds_run += 1
            yield done

    def race(self, question: Question) -> Iterator[RaceStep | Verdict]:
        self.questions.append(question)
        for step in self.race_steps:
            if isinstance(step, Exception):
                raise step
            if self.gate is not None:
                self.gate.acquire()
            yield step


def race_of(text: str, tokens: int) -> list[RaceStep | Verdict]:
    """Both sides take turns; the drafted one is twice as fast."""
    words = [word + " " for word in text.split(" ")][:tokens]
    steps: list[RaceStep | Verdict] = []
    for i, word in enumerate(words):
        steps.append(RaceStep(DRAFTED, word, i + 1, (i + 1) / 40, i + 1 == len(words)))
        steps.append(RaceStep(PLAIN, word, i + 1, (i + 1) / 20, i + 1 == len(words)))
    return steps


def scripted_app(
    folder: Path, backend: ScriptedBackend | None = None, **chat: Any
) -> tuple[ChatApp, ScriptedBackend]:
    """An app on a scripted engine whose conversations are in `folder`."""
    backend = backend or ScriptedBackend()
    decode = chat.pop("decode", DecodeConfig(method="d2sd"))
    config = replace(ChatConfig(conversations=folder), **chat)
    return ChatApp(Start(PairConfig(), decode, config), backend), backend


async def until(condition: Callable[[], object], pilot: Any, most: float = 60.0) -> None:
    """Let the app run until `condition` holds; AssertionError after `most` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + most
    while not condition():
        assert loop.time() < end, "the app did not get there"
        await pilot.pause(0.01)
    await pilot.pause()


def screen_text(app: ChatApp) -> str:
    """What is on screen, line by line."""
    lines = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in lines)


def drive(steps, folder, backend=None, size=(100, 30), **chat):
    """Run `steps(app, pilot, backend)` on a loaded app; nothing may have gone wrong inside."""

    async def run():
        app, used = scripted_app(folder, backend, **chat)
        async with app.run_test(size=size) as pilot:
            await until(lambda: not app.listener.waiting, pilot)
            await steps(app, pilot, used)
            await pilot.pause()
        assert app.return_code in (0, None)
        assert app.clean
        return app

    return asyncio.run(run())


async def say(app, pilot, text):
    app.prompt.text = text
    await pilot.press("enter")
    await pilot.pause()


async def answered(app, pilot, text="What meets?"):
    """Ask and wait for the whole answer."""
    before = len(app.conversation.turns)
    await say(app, pilot, text)
    await until(
        lambda: app.listener.job is None and len(app.conversation.turns) == before + 2, pilot
    )


def notices(app):
    return [str(notice.render()) for notice in app.query(".notice").results(Static)]


def shown_answer(app):
    return app.query(Markdown).last().source
