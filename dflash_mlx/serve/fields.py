"""What the requests of both APIs share: strict fields, and the settings of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from dflash_mlx.core.config import DecodeConfig, StructureConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import LARGEST
from dflash_mlx.serve.errors import ApiError, of_settings, refusal
from dflash_mlx.serve.settings import LONGEST_STOP, MOST_STOPS

Count = Annotated[int, Field(ge=1, le=LARGEST)]
Heat = Annotated[float, Field(ge=0, le=10)]
Share = Annotated[float, Field(ge=0, le=1)]
StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Stops = Annotated[list[StopText], Field(max_length=MOST_STOPS)]
Name = Annotated[str, Field(min_length=1, max_length=200)]

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "repetition_context"),
)


class Strict(BaseModel):
    """An object whose fields are all known, with values of just their types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Sampled(Strict):
    """How tokens are drawn, under the names that both APIs and ours have."""

    temperature: Heat | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repetition_context: Count | None = None


def decoding(
    usual: DecodeConfig,
    body: Sampled,
    max_tokens: int | None,
    stop: Sequence[str],
    names: Mapping[str, str],
    structure: StructureConfig | None = None,
) -> DecodeConfig:
    """The settings of an answer: those of the server with what a request says on top.

    names: of fields by setting, where the API has other ones. structure: what the answer has to be,
    if a request says that. ApiError for what does not go together.
    """
    for i, text in enumerate(stop):
        if not is_text(text):
            field = f"{names.get('stop', 'stop')}[{i}]"
            raise refusal(field, "has half a surrogate pair", "send whole characters")
    asked = {name: getattr(body, name) for name in _SAMPLING}
    asked = {name: value for name, value in asked.items() if value is not None}
    try:
        sampling = replace(usual.sampling, **asked)
        most = usual.max_tokens if max_tokens is None else max_tokens
        kept = structure if structure is not None and structure.kind else usual.structure
        told = replace(usual, sampling=sampling, max_tokens=most, structure=kept)
        return replace(told, stop=(*usual.stop, *stop))
    except DFlashError as error:
        raise of_settings(error, names) from None


def with_seeds(config: DecodeConfig, answers: int) -> list[DecodeConfig]:
    """For several answers to one prompt: each has a seed of its own, where one was given."""
    seed = config.sampling.seed
    if seed is None:
        return [config] * answers
    seeds = [(seed + i) % 2**32 for i in range(answers)]
    return [replace(config, sampling=replace(config.sampling, seed=each)) for each in seeds]


def only(field: str, value: Any, *usual: Any) -> None:
    """ApiError for a field that is taken only with values which ask for nothing."""
    if value is not None and value not in usual:
        shown = " or ".join(repr(each) for each in usual)
        step = f"leave it out{f', or send {shown}' if usual else ''}"
        raise refusal(field, f"is {str(value)[:80]!r}, which this server cannot do", step)


def is_text(text: str) -> bool:
    """Whether it is whole characters, no half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def unknown_model(name: str, known: Sequence[str]) -> ApiError:
    """The model that a request names is not the one that is served."""
    what = f"the model {name[:200]!r} is not served here; ask for {known[0]!r}"
    return ApiError(404, what, "model", "model_not_found")
