"""What the requests of all APIs share: strict fields, a conversation, the settings of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from dflash_mlx.core.config import DecodeConfig, StructureConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import LARGEST
from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.chat import Chat, Json, check_text
from dflash_mlx.serve.errors import of_settings
from dflash_mlx.serve.settings import LONGEST_STOP, MOST_STOPS

Count = Annotated[int, Field(ge=1, le=LARGEST)]
StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Stops = Annotated[list[StopText], Field(max_length=MOST_STOPS)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class Strict(BaseModel):
    """An object whose fields are all known, with values of just their types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Sent(Strict):
    """What clients send back as it came, with fields that change nothing."""

    model_config = ConfigDict(extra="ignore")


class Asked(Strict):
    """The body of a request."""

    model: Name

    def idle(self) -> list[str]:
        """Fields that change nothing, given the others."""
        return []


class Sampled(Strict):
    """How tokens are drawn, under the names that both APIs and ours have."""

    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repetition_context: Count | None = None


class Answered(Sampled, Asked):
    """A request for answers, whatever its API; what is not a field here is said by properties."""

    stop_field: ClassVar[str] = "stop"  # whose texts end an answer

    stream: bool | None = None
    return_progress: bool | None = None  # of the prompt, while a stream has nothing else to say
    max_tokens: Count | None = None

    @property
    def most(self) -> int | None:
        """Tokens of an answer, where the request says."""
        return self.max_tokens

    @property
    def stops(self) -> Sequence[str]:
        """Texts that end an answer."""
        given = getattr(self, self.stop_field)
        return [given] if isinstance(given, str) else given or []

    @property
    def answers(self) -> int:
        """How many to each prompt."""
        return 1

    @property
    def tops(self) -> int | None:
        """Likeliest tokens to tell with each token, None for no log-probabilities."""
        return None

    def check(self) -> None:
        """ApiError for fields that do not go together."""


class Conversation(Asked):
    """A conversation in the words of an API."""

    chat_template_kwargs: Json | None = None

    def chat(self, pair: Pair) -> Chat:
        """The conversation that both APIs share; ApiError for a request that has none."""
        raise NotImplementedError


class ChatBody(Conversation, Answered):
    """A conversation that is to be answered."""


def decoding(
    usual: DecodeConfig, body: Answered, structure: StructureConfig | None = None
) -> list[DecodeConfig]:
    """The settings of each answer to a prompt: those of the server, with the request's on top.

    Where a seed was given, each has one of its own. ApiError for what does not go together.
    """
    for i, text in enumerate(body.stops):
        check_text(text, f"{body.stop_field}[{i}]")
    asked = body.model_dump(include={*Sampled.model_fields}, exclude_none=True)
    try:
        config = replace(
            usual,
            sampling=replace(usual.sampling, **asked),
            max_tokens=usual.max_tokens if body.most is None else body.most,
            structure=structure or usual.structure,
            stop=(*usual.stop, *body.stops),
            logprobs=body.tops,
        )
    except DFlashError as error:
        raise of_settings(error) from None
    if (seed := config.sampling.seed) is None:
        return [config] * body.answers
    seeds = [(seed + i) % 2**32 for i in range(body.answers)]
    return [replace(config, sampling=replace(config.sampling, seed=each)) for each in seeds]
