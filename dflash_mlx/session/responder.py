"""Answers to requests, one after another; a conversation's next turn reuses its caches."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

import platformdirs

from dflash_mlx.core.config import DecodeConfig, PrefixConfig
from dflash_mlx.core.observer import Observer
from dflash_mlx.drafters.methods import drafting_of, settle
from dflash_mlx.engine.delta import Delta
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefix_files import PrefixFiles
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.text import BEGIN, opens_thought
from dflash_mlx.models.memory import available_memory
from dflash_mlx.session.session import Session
from dflash_mlx.session.templates import Message, prompt_tokens
from dflash_mlx.verifier.pass_times import timing_day


@dataclass(frozen=True)
class Question:
    """A conversation to go on with, the question last."""

    messages: tuple[Message, ...]
    system: str | None
    config: DecodeConfig


def prefix_cache(config: PrefixConfig, folder: Path | None = None) -> PrefixCache:
    """A cache for one pair, as the settings say. folder: of its files, by default the user's."""
    memory, disk = config.prefix_gb, int(config.prefix_disk_gb * 1e9)
    limit = available_memory() // 16 if memory is None else int(memory * 1e9)
    place = folder or platformdirs.user_cache_path("dflash-chat") / "prefixes"
    return PrefixCache(limit, PrefixFiles(place, disk) if disk else None)


class Responder:
    """Answers requests with one pair.

    prefixes: caches of conversations, for their next turns; without any, those of the last request
    are kept.
    """

    def __init__(self, pair: Pair, prefixes: PrefixCache | None = None) -> None:
        self.pair, self.prefixes = pair, prefixes or PrefixCache()
        self._session: Session | None = None

    def answer(
        self, request: Question, observer: Observer | None = None
    ) -> Generator[Delta, None, None]:
        """A delta per round; a thought that the chat template opened is opened in the text.

        Raises DFlashError as `prompt_tokens` and `Session` do.
        """
        tokens = prompt_tokens(
            self.pair.tokenizer, request.messages, request.system, template=self.pair.template
        )
        opening = BEGIN if opens_thought(self.pair.tokenizer, tokens) else ""
        for delta in self._session_for(request.config).stream(tokens, observer):
            yield replace(delta, text=opening + delta.text) if opening else delta
            opening = ""

    def time_passes(self, again: bool = False) -> None:
        """As `Pair.calibrate`, while nobody waits."""
        self.pair.calibrate(again)

    def plain_speed(self) -> tuple[float, str]:
        """Tokens per second that the timed passes allow without drafts, and the day of the timing.

        0 and "" where nothing was timed.
        """
        target = self.pair.target
        if target.pass_times is None:
            return 0.0, ""
        return 1 / float(target.pass_times.of(1)), timing_day(target)

    def _session_for(self, config: DecodeConfig) -> Session:
        """The last session; a new one only where drafting itself has changed."""
        config = settle(config, self.pair.capabilities)
        if self._session is None or drafting_of(self._session.config) != drafting_of(config):
            self._session = Session(self.pair, config, self.prefixes)
        self._session.config = config
        return self._session
