"""Grammars of answers, compiled by llguidance: what they allow behind any tokens, and sampling."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.core.config import MOST_ROWS, StructureConfig
from dflash_mlx.core.errors import DFlashError, in_one_line
from dflash_mlx.core.prompt import shared_length
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.core.tree import Accepted, Tree

FORCED = "forced"  # the source of tokens that the grammar leaves no choice of
_MOST_KEPT = 32  # compiled grammars
# One way to write a text is enough: a weak model finds no way into endless spaces, and what stands
# between two values is forced. `x-guidance` in a schema may say otherwise.
AS_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_WORDS = {
    "json_schema": "a JSON schema",
    "json_object": "a JSON object",
    "regex": "a regular expression",
    "grammar": "a grammar",
}


class Constraint:
    """The grammar of one answer, or its limit of thought.

    Everything that it says is a function of the sequence's tokens. The matcher goes back to what
    they share with those that it saw last, and on from there; so trees, rounds and dropped caches
    need no bookkeeping.
    """

    def __init__(self, matcher: Any, start: int, drafts: bool = True) -> None:
        self._matcher = matcher  # an LLMatcher of llguidance, or what answers as one
        self._start = start  # tokens of the prompt
        self._drafts = drafts  # tokens that the grammar leaves no choice of
        self._at: list[int] = []  # tokens of the answer that the matcher has taken in

    def forced_tokens(self, history: Sequence[int]) -> list[int]:
        """The tokens that have to follow `history`, up to the first that can be chosen."""
        taken = self._go_to(self._answer(history))
        return list(self._matcher.compute_ff_tokens()) if taken else []

    def forced_tree(self, history: Sequence[int], most: int) -> Tree | None:
        """At most `most` forced tokens as a chain, without the one that ends; None for none."""
        forced = self.forced_tokens(history) if self._drafts else []
        if not forced:
            return None
        self._go_to([*self._answer(history), *forced])
        drafts = forced[:-1] if self._matcher.is_stopped() else forced
        tokens = drafts[: min(most, MOST_ROWS - 1)]
        return Tree.chain().merge(tokens, [0.0] * len(tokens), FORCED)

    def mask(self, history: Sequence[int], size: int) -> npt.NDArray[np.bool_] | None:
        """[size] which tokens may follow; behind the end its token, None for any.

        None behind forbidden ones, too, which are never taken.
        """
        if not self._go_to(self._answer(history)):
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        if not len(bits):
            return None
        found = np.unpackbits(bits, bitorder="little")[:size].astype(np.bool_)
        if not found.any():
            raise self._broken("no token of the model can follow")
        return np.pad(found, (0, size - len(found)))

    def nodes(self, tree: Tree, history: Sequence[int]) -> list[int]:
        """The nodes of a tree behind `history` whose paths are allowed, in order."""
        kept, behind = [0], {0: self._answer(history)}
        for node in _depth_first(tree):  # neighbours share most of their paths
            parent, token = tree.parents[node], tree.drafted[node - 1]
            fits = parent in behind and self._go_to(behind[parent])
            if fits and self._matcher.validate_tokens([token]):
                behind[node] = [*behind[parent], token]
                kept.append(node)
        return sorted(kept)

    def run(self, history: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` may follow, one after the other."""
        taken = self._go_to(self._answer(history))
        return int(self._matcher.validate_tokens(list(tokens))) if taken else 0

    def end(self, accepted: Accepted, history: Sequence[int]) -> Accepted:
        """What is accepted behind `history`, cut where the answer is over."""
        said = self._answer(history)
        for k, token in enumerate(accepted.tokens):
            said.append(token)
            self._go_to(said)
            if self._matcher.is_stopped():
                return replace(accepted, path=accepted.path[: k + 1], token=token, ends=True)
        return accepted

    def _answer(self, history: Sequence[int]) -> list[int]:
        return list(history[self._start :])

    def _go_to(self, answer: list[int]) -> bool:
        """Bring the matcher behind `answer`, or its end; whether the grammar takes all of it."""
        at = self._at
        shared = min(len(answer), len(at))
        if at[:shared] != answer[:shared]:
            shared = shared_length(at, answer)
        if shared < len(at):
            self._matcher.rollback(len(at) - shared)
            del at[shared:]
        for token in answer[shared:]:
            if self._matcher.is_stopped():
                return True
            if not self._matcher.try_consume_tokens([token]):
                self._check()
                return False
            at.append(token)
        self._check()
        return True

    def _check(self) -> None:
        if self._matcher.is_error():
            raise self._broken(self._matcher.get_error().partition("\n")[0])

    def _broken(self, why: str) -> DFlashError:
        what = f"the grammar gave up {len(self._at)} tokens into the answer ({why})"
        return DFlashError(what, "make it simpler")


class MaskedSampler(Sampler):
    """Draws tokens that a constraint allows: the mask first, then all that `Sampler` does."""

    def __init__(self, sampler: Sampler, constraint: Constraint) -> None:
        super().__init__(sampler.config, sampler.start, sampler.ends)
        self._constraint, self._is_best = constraint, self.is_argmax
        self.needs_history, self.adjusts, self.is_argmax = True, True, False

    def adjusted(self, logits: mx.array, history: Sequence[int]) -> mx.array:
        mask = self._constraint.mask(history, logits.shape[-1])
        if mask is not None:
            logits = mx.where(mx.array(mask), logits, -mx.inf)
        return super().adjusted(logits, history)

    def known(self, history: Sequence[int], best: Callable[[], int]) -> int | None:
        """What is forced; greedily the best token of all, where that is allowed."""
        if forced := self._constraint.forced_tokens(history):
            return forced[0]
        may_be = self._is_best and self._constraint.run(history, [token := best()])
        return token if may_be else None


def _depth_first(tree: Tree) -> list[int]:
    """Nodes 1..N-1, every one behind its parent and before the parent's next child."""
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(tree.parents[1:], start=1):
        paths.append((*paths[parent], node))
    return sorted(range(1, len(tree)), key=paths.__getitem__)


def check_structure(structure: StructureConfig) -> None:
    """Raise DFlashError where llguidance is missing or refuses the text; needs no model."""
    if structure.kind:
        matcher, source, limits = _compiler(structure)
        if said := matcher.validate_grammar(source, limits=limits):
            raise _refused(structure, said)


def left_out(structure: StructureConfig) -> list[str]:
    """What llguidance ignores of a lenient schema; DFlashError where it refuses even that."""
    matcher, source, limits = _compiler(structure)
    is_error, said = matcher.validate_grammar_with_warnings(source, limits=limits)
    if is_error:
        raise _refused(structure, "; ".join(said))
    return [str(each) for each in said]


class Grammars:
    """Grammars compiled for one tokenizer, those asked for last; several threads may ask."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer  # mlx-lm's, around one of Hugging Face's
        self._name = name  # of its model, for people
        self._lock = threading.Lock()  # of what is kept; not held while something compiles
        self.compiled = lru_cache(_MOST_KEPT)(self._compile)

    def matcher(self, structure: StructureConfig) -> Any:
        """A new LLMatcher at the beginning of an answer; DFlashError for what is refused."""
        compiled = self.compiled(structure)
        with self._lock:
            return compiled.deep_copy()

    def _compile(self, structure: StructureConfig) -> Any:
        kind, source, limits = _compiler(structure)
        matcher = kind(self._prepared, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(structure, matcher.get_error())
        return matcher

    @cached_property
    def _prepared(self) -> Any:
        """The tokenizer as llguidance wants it; takes about a second."""
        from llguidance.hf import from_tokenizer

        inner = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
        try:
            if not hasattr(inner, "backend_tokenizer"):
                raise ValueError("it is not of the tokenizers library")
            ends = [token for token in self._tokenizer.eos_token_ids if token < len(inner)]
            if not ends:
                raise ValueError("it has no token that ends an answer")
            return from_tokenizer(inner, eos_token=sorted(ends))
        except ValueError as error:
            raise DFlashError(
                f"llguidance cannot use the tokenizer of {self._name} ({_in_short(str(error))})",
                "ask for an answer without a grammar, or use another model",
            ) from None


def _compiler(structure: StructureConfig) -> tuple[Any, str, Any]:
    """The matcher of llguidance, the grammar for it, and limits; DFlashError if refused."""
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ImportError:
        what = f"{structure.kind} needs llguidance"
        step = "install the extra `structured`, or: pip install llguidance"
        raise DFlashError(what, step, structure.kind) from None
    schema = (structure.json_schema or '{"type": "object"}').removeprefix("\ufeff")
    try:
        if structure.regex is not None:
            source = LLMatcher.grammar_from_regex(structure.regex)
        elif structure.grammar is not None:
            source = LLMatcher.grammar_from_lark(structure.grammar)
        else:
            source = LLMatcher.grammar_from_json_schema(schema, defaults=AS_JSON)
    except ValueError as error:
        raise _refused(structure, str(error)) from None
    return LLMatcher, source, LLParserLimits(verbose_errors=False)


def _refused(structure: StructureConfig, said: str) -> DFlashError:
    what = f"{structure.kind} is not {_WORDS[structure.kind]} that llguidance supports"
    return DFlashError(f"{what} ({_in_short(said)})", "correct it", structure.kind)


def _in_short(said: str) -> str:
    """What llguidance says, on one line, without the pictures of lines that it adds."""
    lines = [line for line in said.splitlines() if not re.match(r"\s*(\d+ \||\^\s*$)", line)]
    text = in_one_line(" ".join(lines))
    return re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", text)
