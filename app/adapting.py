"""The draft model learns from the chat's own conversations while nobody types."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_mlx.client import DFlashError, Job, Pair, PairConfig

if TYPE_CHECKING:
    from dflash_chat.chat_app import ChatApp

LEAST = 80  # answers that are enough to learn from
AFTER = 5.0  # seconds without a key or an answer


def learning(pair: Pair, config: PairConfig, folder: Path) -> Iterator[str | None]:
    """One adaptation in short pieces, None each; a sentence where there is something to say.

    It waits until there are twice as many answers as the last time, as long training costs
    acceptance elsewhere. folder: of conversations, where incognito ones never are.
    """
    if not pair.drafters:
        return
    from dflash_mlx.train.adapt import PROGRAM, Adaptation, find_drafter
    from dflash_mlx.train.rows import conversation_rows

    adaptation = Adaptation(pair, find_drafter(config)[1], conversation_rows(folder, pair))
    known, answers, before = adaptation.file.with_suffix(".answers"), 0, 0
    for _ in conversation_rows(folder, pair):
        answers += 1
        yield None
    with suppress(OSError, ValueError):
        before = int(known.read_text())
    if answers < max(LEAST, 2 * before):
        return
    try:
        while adaptation.step():
            yield None
    except DFlashError as error:
        yield str(error)
    with suppress(OSError):
        known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        known.write_text(str(answers))
    if adaptation.kept:
        told = f"the draft model has learned from your conversations ({adaptation.told}), for the "
        yield f"{told}next time that it is loaded; python -m {PROGRAM} --undo goes back"


class Learner:
    """Has an app's worker let the draft model learn, whenever nobody types for a while."""

    def __init__(self, app: ChatApp) -> None:
        self._app, self._since = app, 0.0
        self._job: Job | None = None

    def tick(self) -> None:
        """Begin, or go on, when it is time."""
        app, heard = self._app, self._app.listener
        if app.pair is None or heard.job or heard.waiting or heard.race:
            self.stop()
        elif self._job is None and time.monotonic() - self._since >= AFTER:
            self._job = app.worker.run(lambda _: app.backend.learn(app.store.folder), idle=True)

    def stop(self) -> None:
        """Somebody types or waits: end it after this piece; it goes on where it was."""
        self._since = time.monotonic()
        if self._job is not None:
            self._app.worker.withdraw(self._job)
            self._job = None
