"""Several conversations at once with one pair: one pass of the target per step for all of them."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.observer import Observer
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.drafters.methods import drafting_of, make_drafter, settle
from dflash_mlx.engine.decode import make_rule
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.engine import Engine
from dflash_mlx.engine.exact import noise_of
from dflash_mlx.engine.grammar import constraint_of
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.state import State
from dflash_mlx.engine.step import Running
from dflash_mlx.session.answer import Answering, TextDelta, check_length

UNUSED = 8  # drafters that are kept for answers to come: a draw of each temperature has its own


class Conversations:
    """Answers in the making; for one thread.

    memory, prefixes, most: as for `Engine`. Answers that draft alike share a drafter, which drafts
    for all of them in one pass where it can.
    """

    def __init__(
        self,
        pair: Pair,
        memory: int | None = None,
        observer: Observer | None = None,
        prefixes: PrefixCache | None = None,
        most: int = sys.maxsize,
    ) -> None:
        self.pair, self.engine = pair, Engine(pair.target, memory, observer, prefixes, most=most)
        self._drafters: dict[Hashable, Drafter] = {}
        self._answers: dict[Answering, Running] = {}
        self._behind: dict[Answering, list[Running]] = {}  # by the answer whose prompt they share

    def __len__(self) -> int:
        """Answers that are not finished, those that wait included."""
        return len(self._answers)

    def begin(
        self, tokens: Sequence[int], config: DecodeConfig, behind: Answering | None = None
    ) -> Answering:
        """Take in the prompt `tokens`, the whole conversation so far.

        behind: an answer to the same prompt, which is read only once where prefixes are kept.
        Raises DFlashError where it is empty or does not fit the context or the memory, and where
        the method or the grammar does not fit the pair.
        """
        pair, target, config = self.pair, self.pair.target, settle(config, self.pair.capabilities)
        check_length(target, tokens)
        constraint = constraint_of(pair, config, len(tokens))
        if config.exact:
            noise_of(target)  # now, not in the others' time
        drafter, sampler = self._drafter(config), Sampler(config.sampling)
        state = State(target.new_cache(), drafter.new_context())
        state.constraint = constraint
        state.end = min(len(tokens) - 1 + config.max_tokens, target.context_length - 1)
        running = Running(
            state,
            drafter,
            tuple(tokens),
            config.prefill_step,
            make_rule=lambda: make_rule(target, state, sampler, config, company=True),
            exact=config.exact,
        )
        answering = Answering(pair, config, drafter.name, tokens)
        self.engine.check(running)
        if behind in self._answers and self.engine.prefixes is not None and behind.is_unread:
            self._behind.setdefault(behind, []).append(running)
        else:
            self.engine.add(running)
        self._answers[answering] = running
        return answering

    def _let_go(self, answering: Answering) -> None:
        """Begin those that waited for an answer's prompt."""
        for running in self._behind.pop(answering, ()):
            self.engine.add(running)

    def cancel(self, answering: Answering) -> None:
        """Give up an answer, finished or not; the others do not notice."""
        if (running := self._answers.pop(answering, None)) is not None:
            self.engine.cancel(running)
            for waiting in self._behind.values():
                waiting[:] = [each for each in waiting if each is not running]
        self._let_go(answering)

    def step(self) -> list[tuple[Answering, TextDelta | Exception]]:
        """One pass; what became of every answer that it brought on.

        Those with a finish reason, and those that failed, are over.
        """
        outcomes = dict(self.engine.step())
        news: list[tuple[Answering, TextDelta | Exception]] = []
        for answering, running in self._answers.items():
            outcome = outcomes.get(running)
            if isinstance(outcome, Exception):
                news.append((answering, outcome))
            elif outcome is not None:
                if answering.is_unread:
                    answering.end_prompt(running.reused)
                    self._share(running, answering)
                news.append((answering, answering.take(outcome)))
                answering.resume()  # nobody is waited for between two steps
                if answering.reason is not None:
                    running.state.trim(answering.length - 1)
        for answering, said in news:
            if isinstance(said, Exception) or answering.reason is not None:
                self.cancel(answering)
        return news

    def _share(self, running: Running, answering: Answering) -> None:
        """Let others go on from a prompt that has just been read."""
        prefixes = self.engine.prefixes
        if prefixes is not None and answering in self._behind and not running.exact:
            prefixes.put(running.state, self.pair.target, running.drafter)
        self._let_go(answering)

    def _drafter(self, config: DecodeConfig) -> Drafter:
        """One for all that draft alike; of those that nobody uses, the newest few are kept."""
        key = drafting_of(config)
        drafter = self._drafters.pop(key, None) or make_drafter(self.pair, config)
        used = {id(running.drafter) for running in self._answers.values()}
        unused = [k for k, kept in self._drafters.items() if id(kept) not in used]
        for oldest in unused[: max(0, len(unused) - UNUSED)]:
            del self._drafters[oldest]
        self._drafters[key] = drafter
        return drafter
