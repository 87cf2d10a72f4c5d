"""One conversation: answers as they are decoded, with caches that later turns reuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.observer import Observer
from dflash_mlx.drafters.methods import make_drafter, settle
from dflash_mlx.engine.constraint import Constraint
from dflash_mlx.engine.decode import decode, prefill
from dflash_mlx.engine.exact import noise_of
from dflash_mlx.engine.grammar import constraint_of
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.state import State
from dflash_mlx.session.answer import Answer, Answering, TextDelta, check_length, collect
from dflash_mlx.session.templates import Prompt, prompt_tokens


class Session:
    """One conversation with one pair: turns reuse the caches of the turns before.

    config: settings of every turn, with a method in place of `auto` once it is made. prefixes:
    where turns find and leave their caches; without any, the last turn's are kept. Raises
    DFlashError where the method or the grammar does not fit the pair.
    """

    def __init__(
        self, pair: Pair, config: DecodeConfig | None = None, prefixes: PrefixCache | None = None
    ) -> None:
        self.pair = pair
        self.prefixes = prefixes or PrefixCache()
        self.config = settle(config or DecodeConfig(), pair.capabilities)
        constraint_of(pair, self.config, 0)
        self.drafter = make_drafter(pair, self.config)
        if self.config.guarded:
            noise_of(pair.target)  # now, not in the time of the first answer
        self.state = self._empty()

    def stream(
        self, tokens: Sequence[int], observer: Observer | None = None
    ) -> Iterator[TextDelta]:
        """Answer the prompt `tokens`: the whole conversation so far, one delta per round.

        What the caches hold of it is not computed again. The caller may stop at any time and call
        again. Raises DFlashError when the prompt is empty or does not fit the context.
        """
        prompt = list(tokens)
        check_length(self.pair.target, prompt)
        constraint = constraint_of(self.pair, self.config, len(prompt))
        return self._whole_or_nothing(self._answer(prompt, constraint, observer or Observer()))

    def _whole_or_nothing(self, deltas: Iterator[TextDelta]) -> Iterator[TextDelta]:
        """Start over with empty caches where a round broke off, as with an interrupt inside it."""
        try:
            yield from deltas
        except GeneratorExit:  # the caller has stopped between two rounds
            raise
        except BaseException:
            self.state = self._empty()
            raise
        finally:
            if not self.config.guarded:
                self.prefixes.put(self.state, self.pair.target, self.drafter)

    def _empty(self) -> State:
        return State(self.pair.target.new_cache(), self.drafter.new_context())

    def _begin(self, prompt: list[int]) -> State:
        """Where the answer to a prompt begins."""
        if self.config.guarded:
            return self._empty()  # rows of passes over several rows are not plain ones
        return self.prefixes.take(prompt, self.pair.target, self.drafter)

    def _answer(
        self, prompt: list[int], constraint: Constraint | None, observer: Observer
    ) -> Iterator[TextDelta]:
        target, drafter, config = self.pair.target, self.drafter, self.config
        answering = Answering(self.pair, config, drafter.name, prompt)
        self.state = state = self._begin(prompt)
        state.constraint = constraint
        answering.end_prompt(prefill(target, drafter, state, prompt, config, observer))
        for round_ in decode(target, drafter, state, config, observer):
            delta = answering.take(round_)
            if answering.reason is not None:
                state.trim(answering.length - 1)
            yield delta
            if answering.reason is not None:
                return
            answering.resume()


def stream(
    pair: Pair,
    prompt: Prompt,
    config: DecodeConfig | None = None,
    system: str | None = None,
    observer: Observer | None = None,
) -> Iterator[TextDelta]:
    """Answer one prompt, a delta per round.

    prompt: a user's text, or a conversation as messages with "role" and "content".
    Raises DFlashError for an empty or too long prompt and for settings that do not fit the pair.
    For conversations with reused caches see `Session`.
    """
    tokens = prompt_tokens(pair.tokenizer, prompt, system, template=pair.template)
    return Session(pair, config).stream(tokens, observer)


def generate(
    pair: Pair,
    prompt: Prompt,
    config: DecodeConfig | None = None,
    system: str | None = None,
) -> Answer:
    """The whole answer to one prompt; arguments and errors as for `stream`."""
    return collect(stream(pair, prompt, config, system))
