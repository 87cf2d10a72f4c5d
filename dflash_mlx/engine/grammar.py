"""Grammars of answers, compiled against a tokenizer by llguidance."""

from __future__ import annotations

import re
import threading
from functools import cached_property, lru_cache
from typing import Any

from dflash_mlx.core.config import PLAIN, DecodeConfig, StructureConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.constraint import Constraint
from dflash_mlx.engine.pair import Pair

_MOST_KEPT = 32  # compiled grammars
_LONGEST = 300  # characters of what llguidance says
# One way to write a text is enough: a weak model finds no way into endless spaces, and what stands
# between two values is forced. `x-guidance` in a schema may say otherwise.
AS_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_WORDS = {
    "json_schema": "a JSON schema",
    "json_object": "a JSON object",
    "regex": "a regular expression",
    "grammar": "a grammar",
}


def constraint_of(pair: Pair, config: DecodeConfig, start: int) -> Constraint | None:
    """What an answer behind `start` tokens may be, None where it may be anything.

    Raises DFlashError as `check_structure` does, and for a tokenizer that llguidance cannot take.
    """
    if not config.structure.kind:
        return None
    grammars = pair.recall(("grammars",), lambda: Grammars(pair.tokenizer, pair.target.name))
    return Constraint(grammars.matcher(config.structure), start, config.method != PLAIN)


def check_structure(structure: StructureConfig) -> None:
    """Raise DFlashError where llguidance is missing or refuses the text; needs no model."""
    if structure.kind:
        matcher = _llguidance(structure).LLMatcher
        if said := matcher.validate_grammar(_source(structure), limits=_limits(structure)):
            raise _refused(structure, said)


class Grammars:
    """Grammars compiled for one tokenizer; those that were asked for last are kept.

    Several threads may ask, so that one can compile ahead while another decodes.
    """

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
        limits, source = _limits(structure), _source(structure)
        library = _llguidance(structure)
        matcher = library.LLMatcher(self._prepared, source, log_level=0, limits=limits)
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
                raise ValueError("it is none of the tokenizers library")
            ends = [token for token in self._tokenizer.eos_token_ids if token < len(inner)]
            if not ends:
                raise ValueError("it has no token that ends an answer")
            return from_tokenizer(inner, eos_token=sorted(ends))
        except ValueError as error:
            raise DFlashError(
                f"llguidance cannot use the tokenizer of {self._name} ({_in_short(str(error))})",
                "ask for an answer without a grammar, or use another model",
            ) from None


def _llguidance(structure: StructureConfig) -> Any:
    try:
        import llguidance
    except ImportError:
        what = f"{structure.kind} needs llguidance"
        step = "install the extra `structured`, or: pip install llguidance"
        raise DFlashError(what, step, structure.kind) from None
    return llguidance


def _limits(structure: StructureConfig) -> Any:
    return _llguidance(structure).LLParserLimits(verbose_errors=False)


def _source(structure: StructureConfig) -> str:
    """The grammar as LLMatcher takes it; DFlashError for a schema of another shape."""
    matcher = _llguidance(structure).LLMatcher
    if structure.regex is not None:
        return str(matcher.grammar_from_regex(structure.regex))
    if structure.grammar is not None:
        return str(matcher.grammar_from_lark(structure.grammar))
    schema = (structure.json_schema or '{"type": "object"}').removeprefix("\ufeff")
    try:
        return str(matcher.grammar_from_json_schema(schema, defaults=AS_JSON))
    except ValueError as error:
        raise _refused(structure, str(error)) from None


def _refused(structure: StructureConfig, said: str) -> DFlashError:
    what = f"{structure.kind} is not {_WORDS[structure.kind]} that llguidance takes"
    return DFlashError(f"{what} ({_in_short(said)})", "correct it", structure.kind)


def _in_short(said: str) -> str:
    """What llguidance says, on one line, without the pictures of lines that it adds."""
    lines = [line for line in said.splitlines() if not re.match(r"\s*(\d+ \||\^\s*$)", line)]
    text = " ".join(" ".join(lines).split())
    text = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", text)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
