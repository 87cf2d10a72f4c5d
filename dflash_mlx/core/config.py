"""Every setting with its default and its help text; command lines are generated from these."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import (
    ABOVE_0,
    Given,
    Options,
    Settings,
    check_values,
    file_text,
    number_or_auto,
    require,
)
from dflash_mlx.core.option import option as option
from dflash_mlx.core.text import parse_json

AUTO, PLAIN = "auto", "none"  # methods that every table of them has, see `drafters/methods.py`
BITS = (4, 8)
AS_STORED = 16  # bits of a draft model that is not packed
HOTTEST = 10.0  # temperature; long before, any token is as likely as any other
MOST_ROWS = 96  # tokens that a pass verifies, and with that of a block
RESERVED = (  # arguments of a chat template that whoever renders a conversation decides
    *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding"),
    *("add_generation_prompt", "continue_final_message", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)


@dataclass(frozen=True)
class PairConfig:
    """Which target and which drafter to load."""

    model: str | None = option(
        None,
        "target: a Hugging Face id, a local folder or a GGUF file (default: the embedded "
        "SmolLM2-135M)",
    )
    drafter: str | None = option(
        None,
        "draft model: a Hugging Face id or a local folder, or none (default: the one that is known "
        "for the model; without one, drafts come from prompt lookup)",
    )
    second_drafter: str | None = option(
        None,
        "d2sd's variable-prefix draft model, named likewise; with none, the first one continues "
        "its own drafts (default: the one that fits the model)",
    )
    kernels: str = option(
        "auto",
        "Metal kernels: auto uses each one that agrees with MLX and is faster on this machine, "
        "which it tries once; on uses every one that can run. They need Metal",
        choices=("auto", "off", "on"),
    )
    drafter_bits: int | None = option(
        None,
        "quantise the draft models to 4 or 8 bits when they are loaded: less to read, slightly "
        "worse drafts, the same answers (default: on a GPU 8, but for small language models; 16 "
        "leaves them as they are)",
        type=int,
        choices=(*BITS, AS_STORED),
    )
    kv_bits: int | None = option(
        None,
        "keep keys and values in 4 or 8 bits: less memory for long conversations. Answers change, "
        "because the model then computes with rounded numbers, with and without drafts alike",
        type=int,
        choices=BITS,
    )
    draft_window: int | None = option(
        None,
        "how many tokens back the draft models see, the current one included: limits the memory "
        "of their context; the same answers (default: as they were trained)",
        least=2,
        type=int,
    )
    draft_vocabulary: int | None = option(
        None,
        "draft only from this many frequent tokens and those of the conversation, which is "
        "faster; the same answers (default: a quarter of the model's, or 8192)",
        least=1,
        type=int,
    )
    adapted: bool = option(
        False, "draft with what dflash_mlx.train.adapt learned; the same answers"
    )
    template: tuple[str, ...] = option(
        (),
        "an argument of the model's chat template, the value as JSON, as in enable_thinking=false; "
        "may be repeated",
        metavar="KEY=VALUE",
    )

    def __post_init__(self) -> None:
        check_values(self)
        _ = self.template_arguments

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The values by name; DFlashError for a text that is no KEY=VALUE, or decided elsewhere."""
        arguments = {}
        for text in self.template:
            key, _, value = text.partition("=")
            try:
                arguments[key] = parse_json(value)
            except ValueError:
                key = ""
            shown, own = text[:200], "an argument of the model's template"
            require(key.isidentifier(), "template", shown, "KEY=VALUE, the value as JSON")
            require(key not in RESERVED, "template", shown, own)
        return arguments


ALL_BUT_MODEL = tuple(f.name for f in fields(PairConfig) if f.name != "model")


@dataclass(frozen=True)
class PrefixConfig(Settings):
    """How much is kept of earlier conversations, for those that begin alike or repeat them."""

    prefix_gb: float | None = option(
        None,
        "gigabytes of memory for earlier conversations as the model has read them, so that they "
        "continue without being read again (default: a sixteenth of the memory)",
        least=0,
        type=float,
    )
    prefix_disk_gb: float = option(
        4.0,
        "gigabytes of disk for the same, after a restart; these files contain your conversations, "
        "and only you can read them; 0 keeps nothing there",
        least=0,
    )
    lookup_in: str = option(
        "all",
        "where drafts look for what the answer may repeat: conversation (this one alone), or all "
        "(earlier ones of this user, too, which are kept for that)",
        choices=("all", "conversation"),
    )
    lookup_mb: float = option(
        64.0,
        "megabytes of memory, and of disk, for those earlier ones; the oldest go first",
        least=ABOVE_0,
    )


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen from the target's logits; temperature 0 is greedy."""

    temperature: float = option(
        0.0, "0 is greedy, higher is more random", label="Temperature", least=0, most=HOTTEST
    )
    top_p: float = option(
        1.0,
        "choose from the likeliest tokens that together have this probability",
        label="Likeliest tokens, by probability (top-p)",
        least=ABOVE_0,
        most=1,
    )
    top_k: int = option(
        0,
        "choose from this many of the likeliest tokens; 0 is all of them",
        label="Likeliest tokens, by number (top-k)",
        least=0,
    )
    min_p: float = option(
        0.0,
        "leave out tokens below this share of the likeliest one's probability",
        label="Least share of the likeliest (min-p)",
        least=0,
        most=1,
    )
    repetition_penalty: float = option(
        1.0,
        "make recent tokens less likely; 1 is off",
        label="Penalty for repeating",
        least=ABOVE_0,
    )
    repetition_context: int = option(
        20,
        "how many recent tokens that penalty counts, those of the prompt too",
        label="Tokens that count as repeated",
        least=0,
    )
    presence_penalty: float = option(
        0.0, "take this from the logits of tokens that the answer has", least=-2, most=2
    )
    frequency_penalty: float = option(
        0.0, "take this from the logits of tokens for each time in the answer", least=-2, most=2
    )
    seed: int | None = option(
        None,
        "the same seed draws the same answer (default: a new one each time)",
        type=int,
        label="Random seed",
        least=0,
        most=2**32 - 1,
    )
    logit_bias: tuple[tuple[int, float], ...] = ()  # what is added to the logits of tokens
    min_tokens: int = 0  # of an answer before a token or a text may end it
    stop_token_ids: tuple[int, ...] = ()  # that end an answer, besides the model's own
    ignore_eos: bool = False  # the model's own tokens do not end an answer

    def __post_init__(self) -> None:
        check_values(self)
        for token, bias in self.logit_bias:
            require(-100 <= bias <= 100, "logit_bias", {token: bias}, "-100 to 100")

    def ends(self, eos: Iterable[int]) -> frozenset[int]:
        """The tokens that end an answer. eos: the model's own."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos)

    def with_seed(self) -> SamplingConfig:
        """With a random seed, if none was given."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))


@dataclass(frozen=True)
class StructureConfig:
    """What the text of an answer has to be: one of these, or anything; llguidance reads them."""

    json_schema: str | None = option(
        None,
        "a file with a JSON schema that every answer follows, on one line; needs llguidance",
        type=file_text,
        metavar="FILE",
    )
    json_object: bool = option(False, "every answer is a JSON object; needs llguidance")
    regex: str | None = option(
        None, "a regular expression that the whole of every answer matches; needs llguidance"
    )
    grammar: str | None = option(
        None,
        "a file with a grammar in Lark's syntax that every answer follows; needs llguidance",
        type=file_text,
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        for name in (n for n in given if n != "json_object"):
            text = getattr(self, name)
            require(isinstance(text, str) and text != "", name, text, "a text")
        if len(given) > 1:
            what = f"{given[0]} and {given[1]} are both given"
            raise DFlashError(what, "leave one of them out", given[0])
        if self.json_schema is not None:
            try:
                schema = parse_json(self.json_schema)
            except ValueError as error:
                what = f"json_schema is not JSON ({error})"
                raise DFlashError(what, "correct it", "json_schema") from None
            is_object = isinstance(schema, dict)
            require(is_object, "json_schema", self.json_schema[:40], "a JSON object")

    @property
    def kind(self) -> str:
        """The field that is given, "" for none."""
        return next((f.name for f in fields(self) if getattr(self, f.name)), "")


@dataclass(frozen=True)
class DecodeConfig:
    """How one answer is decoded."""

    method: str = option(
        AUTO,
        "how tokens are drafted: none is plain decoding, auto picks the best for the pair",
        label="Method",
    )
    block_size: int | None = option(
        None,
        "tokens per draft block, the anchor included; methods that draft chains then always check "
        "the whole block (default: as the draft model was trained; checked as far as that pays)",
        type=int,
        label="Tokens in a draft block",
        least=2,
    )
    budget: int | None = option(
        None,
        "for trees: most tokens that one pass checks, the anchor included; auto is as many as pay "
        "just then, or none (default: auto)",
        type=number_or_auto,
        label="Tokens checked in one pass",
        least=2,
        most=MOST_ROWS,
    )
    lookup: bool = option(
        True,
        "also guess by repeating earlier text, unless the size of drafts is given",
        action=argparse.BooleanOptionalAction,
        label="Look up what was said before",
    )
    recalibrate: bool = option(
        False,
        "measure this machine again, instead of using earlier measurements",
        label="Time this machine again",
    )
    acceptance: str = option(
        "auto",
        "for chains, with a temperature above 0: match keeps a draft that equals the token that "
        "the target draws, so a seed gives the same answer with and without drafts; reject draws "
        "drafts and keeps each with probability min(1, p/q): the same distribution and more "
        "accepted drafts, but another answer for a seed, a fixed one only in blocks of one size; "
        "auto is reject if no seed is given and no tree is drafted, else match",
        choices=("auto", "match", "reject"),
        label="Acceptance",
    )
    exact: bool = option(
        False,
        "decide near-ties as plain decoding does, so that greedy answers are the same token by "
        "token; needs memory for a second cache and time for every near-tie, and reads the whole "
        "conversation again for every answer",
        label="Near-ties as in plain decoding",
    )
    max_tokens: int = option(512, "stop after this many tokens", label="Longest answer", least=1)
    stop: tuple[str, ...] = option(
        (), "stop before this text appears; may be repeated", label="Texts that end the answer"
    )
    prefill_step: int = option(
        512,
        "prompt tokens per pass of the model",
        label="Tokens of the prompt in one pass",
        least=1,
    )
    # Likeliest tokens that deltas tell with the log-probability of each of theirs; None for none.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for the prompt, with the first delta
    reads_only: bool = False  # the prompt is read, and no token is made
    thought_tokens: int | None = None  # at most, see `ThoughtLimit`; None for no limit
    options: Options | Given | None = None  # the method's own, see `Method.options`
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    structure: StructureConfig = field(default_factory=StructureConfig)

    def __post_init__(self) -> None:
        check_values(self)
        if self.exact and (heat := self.sampling.temperature) != 0:
            what = f"exact is for greedy decoding, but the temperature is {heat:g}"
            raise DFlashError(what, "choose temperature 0, or leave it out", "exact")
        require(not isinstance(self.stop, str), "stop", self.stop, "a tuple of texts")
        require("" not in self.stop, "stop", "", "a text of at least one character")
        for name in ("logprobs", "prompt_logprobs", "thought_tokens"):
            value = getattr(self, name)
            counts = value is None or (type(value) is int and value >= 0)
            require(counts, name, value, "how many tokens, 0 or more")

    @property
    def guarded(self) -> bool:
        """Whether near-ties are decided again; plain decoding has nothing to decide."""
        return self.exact and self.method != PLAIN

    @property
    def draws_drafts(self) -> bool:
        """Whether drafts are drawn, for rejection sampling, where the method can draw them."""
        if self.sampling.temperature == 0:
            return False
        unseeded = self.acceptance == "auto" and self.sampling.seed is None
        return unseeded or self.acceptance == "reject"
