"""What becomes of a request before anything is computed for it: a sequence, or a refusal."""

from __future__ import annotations

from dataclasses import replace

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.engine.constraint import MaskedSampler
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.exact import NearTieGuard, noise_of
from dflash_mlx.engine.grammar import constraint_of
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.engine.state import State
from dflash_mlx.engine.text import StopText
from dflash_mlx.engine.verify import (
    AcceptanceRule,
    RejectionSampling,
    TargetSampling,
)
from dflash_mlx.verifier.model import Target


def make_sequence(
    pair: Pair, prompt: Prompt, config: DecodeConfig, drafter: Drafter, alone: bool
) -> Sequence:
    """A sequence of which nothing was read.

    alone: no other will be in its passes, so plain decoding has no near-ties to decide. Raises
    DFlashError where the prompt or the grammar does not fit the pair.
    """
    target = pair.target
    check_length(target, prompt)
    config = replace(config, exact=config.guarded if alone else config.exact)
    state = State(target.new_cache(), drafter.new_context())
    state.constraint = constraint_of(pair, config, len(prompt))
    state.end = min(len(prompt) - 1 + config.max_tokens, target.context_length - 1)
    rule, text = acceptance_rule(target, state, config), StopText(pair.tokenizer, config.stop)
    return Sequence(state, drafter, prompt, config, rule, text)


def check_length(target: Target, prompt: Prompt) -> None:
    """Raise DFlashError for a prompt that is empty or leaves no room for an answer."""
    limit = target.context_length
    if not len(prompt):
        raise DFlashError("the prompt is empty", "give at least one token")
    if len(prompt) >= limit:
        raise DFlashError(
            f"the prompt has {len(prompt)} tokens, but {target.name} can hold "
            f"{limit} with the answer",
            "shorten the prompt or begin a new conversation",
        )


def acceptance_rule(target: Target, state: State, config: DecodeConfig) -> AcceptanceRule:
    """The rule that the settings ask for, for one answer, under its constraint."""
    sampler = Sampler(config.sampling)
    if state.constraint is not None:
        sampler = MaskedSampler(sampler, state.constraint)
    if config.exact:
        return NearTieGuard(target, sampler, noise_of(target))
    return RejectionSampling(sampler) if config.draws_drafts else TargetSampling(sampler)
