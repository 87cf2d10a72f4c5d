"""Hostile texts in every place of the chat where foreign texts are shown."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyte

from dflash_chat.conversation import Conversation, Turn
from dflash_chat.keeper import Keeper
from dflash_chat.screens import RowsScreen
from dflash_chat.status import Progress
from dflash_chat.store import Store
from support.app_scripts import ANSWER, ScriptedBackend, answered, drive, pair_of, say
from support.hostile import Watched, commands_in, hostile_text, state

HIGH, USUAL = (100, 250), (100, 60)  # the first shows a whole conversation at once
TURNS, IN_A_TURN = 10, 4
EACH = TURNS * IN_A_TURN + 10  # cases of one conversation, and of what else the chat shows


def painted(app) -> str:
    """All that the screen writes to the terminal, line by line."""
    return "\n".join(strip.render(app.console) for strip in app.screen._compositor.render_strips())


def obeyed(app, screen: pyte.Screen, stream: pyte.Stream) -> list[str]:
    """What of the painted screen commands a terminal, or leaves its state another one."""
    before, shown = state(screen), painted(app)
    stream.feed("\x1b[H" + shown.replace("\n", "\r\n") + "\x1b[0m")
    changed = [name for name, value in state(screen).items() if value != before[name]]
    return commands_in(shown) + changed


def torment(folder: Path, seeds: Iterable[int]) -> dict[str, list[str]]:
    """Show EACH hostile texts for every seed; what a terminal would have obeyed, by where and when.

    They are questions, answers and thoughts as they are read from a file and as they stream, a
    title in the head line, in the list and in a dialog, the name of a model, progress, an error.
    """
    found: dict[str, list[str]] = {}
    backend = ScriptedBackend([ANSWER])

    def watch(size, show):
        screen = Watched(*size)
        stream = pyte.Stream(screen)

        async def steps(app, pilot, _):
            async def look(place: str) -> None:
                await pilot.pause()
                if wrong := obeyed(app, screen, stream):
                    found[f"{place} of seed {seed}"] = wrong

            for seed in seeds:
                await show(app, pilot, seed, look)

        drive(steps, folder / "talks", backend, size)

    async def conversation(app, pilot, seed, look):
        store = stored(folder / f"talks-{seed}", seed)
        (entry,) = store.entries()
        await app.show_conversation(store.open(entry.file).conversation)
        app.pair = pair_of(hostile_text(f"{seed}/name"))
        app.show_header()
        await look("conversation")
        assert app.transcript.max_scroll_y == 0, "all of it is on screen"

    async def elsewhere(app, pilot, seed, look):
        app.keeper = Keeper(Store(folder / f"talks-{seed}"))
        await app.show_conversation(Conversation())
        await say(app, pilot, "/open")
        assert await app.keeper.finish(60)
        await look("list")
        await pilot.press("escape")
        backend.answers = [hostile_text(f"{seed}/answer")]
        await answered(app, pilot, "x" + hostile_text(f"{seed}/question"))
        app.status.progress(Progress(hostile_text(f"{seed}/progress")))
        await app.say(hostile_text(f"{seed}/error"), "error")
        await look("answer")
        rows = [(hostile_text(f"{seed}/row"), hostile_text(f"{seed}/value"))]
        app.push_screen(RowsScreen("Figures", rows))
        await look("dialog")
        await pilot.press("escape")

    watch(HIGH, conversation)
    watch(USUAL, elsewhere)
    return found


def stored(folder: Path, seed: int) -> Store:
    """A store that holds one conversation of hostile texts."""
    texts = [
        "\n\n".join(hostile_text(f"{seed}/{turn}/{i}") for i in range(IN_A_TURN))
        for turn in range(TURNS)
    ]
    turns = [Turn(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
    turns[-1] = Turn("assistant", f"<think>{texts[-1]}</think>{hostile_text(seed)}")
    store = Store(folder)
    store.save(Conversation(title=hostile_text(f"{seed}/title"), turns=turns))
    return store
