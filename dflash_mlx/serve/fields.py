"""What the requests of all APIs share: strict fields, a conversation, the settings of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dflash_mlx.core.config import DecodeConfig, StructureConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import LARGEST
from dflash_mlx.serve.chat import Chat, Json, check_text
from dflash_mlx.serve.errors import of_settings, refusal
from dflash_mlx.serve.settings import LONGEST_STOP, MOST_STOPS, MOST_TOKENS

Count = Annotated[int, Field(ge=1, le=LARGEST)]
Budget = Annotated[int, Field(ge=0, le=LARGEST)]
StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Stops = Annotated[list[StopText], Field(max_length=MOST_STOPS)]
Stop = StopText | Stops
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Token = Annotated[int, Field(ge=0, le=LARGEST)]
TokenText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Name = Annotated[str, Field(min_length=1, max_length=200)]
# What APIs say of thoughts: efforts, whether there are any, and how many tokens; the last counts.
_WISHES = (
    *("output_config.effort", "reasoning.effort", "reasoning_effort"),
    *("reasoning.enabled", "thinking.type", "enable_thinking", "think"),
    *("thinking.budget_tokens", "reasoning.max_tokens", "thinking_budget"),
)
_TYPES = {"enabled": True, "disabled": False}  # "adaptive": as the model has it


class Strict(BaseModel):
    """An object whose fields are all known, with values of just their types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Sent(Strict):
    """What clients send back as it came, with fields that change nothing."""

    model_config = ConfigDict(extra="ignore")


class Asked(Strict):
    """The body of a request."""

    model: Name

    @property
    def wishes(self) -> Json:
        """Efforts, budgets and switches of thoughts in the request, by the fields' names."""
        found: Json = dict.fromkeys(_WISHES, self)
        for name in found:
            for part in name.split("."):
                found[name] = getattr(found[name], part, None)
        return {name: value for name, value in found.items() if value is not None}

    def idle(self) -> list[str]:
        """Fields that change nothing, given the others."""
        return []


class Sampled(Strict):
    """How tokens are drawn and which end an answer, under the names that the APIs and ours have."""

    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repetition_context: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenText, Bias], Field(max_length=MOST_TOKENS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MOST_TOKENS)] | None = None
    ignore_eos: bool | None = None


class Answered(Sampled, Asked):
    """A request for answers, whatever its API; what is not a field here is said by properties."""

    stop_field: ClassVar[str] = "stop"  # whose texts end an answer
    media: ClassVar[str] = "text/event-stream"  # type of a stream
    streams_calls: ClassVar[bool] = True  # a stream has arguments of calls as they are made
    most_field: ClassVar[str] = "max_tokens"  # the API's own for it; this one is known in all

    stream: bool | None = None
    method: Literal["none"] | None = None  # without drafts, to compare; by default the server's
    lookup_in: Literal["conversation"] | None = None  # alone, and is not kept for others
    return_progress: bool | None = None  # of the prompt, while a stream has nothing else to say
    max_tokens: Count | None = None

    @property
    def most(self) -> int | None:
        """Tokens of an answer, where the request says; 0 to have the prompt read alone."""
        return getattr(self, self.most_field) or self.max_tokens

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

    @property
    def laws(self) -> tuple[int | None, int | None]:
        """As `tops`, what is computed for the answer, and for the prompt."""
        return self.tops, None

    def check(self) -> None:
        """ApiError for fields that do not go together."""
        if self.max_tokens not in (None, self.most):
            what = f"is {self.max_tokens}, but {self.most_field} {self.most}"
            raise refusal("max_tokens", what, "send one of them")


class Reasoning(Strict):
    """How much the model thinks, in the words of OpenAI and OpenRouter."""

    effort: str | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None
    summary: str | None = None  # thoughts are told in full


class ThinkingChoice(Strict):
    """Whether the model thinks, in the words of Anthropic and others."""

    type: Annotated[Literal["enabled", "disabled", "adaptive"], AfterValidator(_TYPES.get)]
    budget_tokens: Budget | None = None
    display: str | None = None


class Conversation(Asked):
    """A conversation in the words of an API."""

    chat_template_kwargs: Json | None = None
    enable_thinking: bool | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: str | None = None
    thinking: ThinkingChoice | None = None
    thinking_budget: Budget | None = None
    include_reasoning: bool | None = None  # false: thoughts are not told

    def chat(self) -> Chat:
        """The conversation that both APIs share; ApiError for a request that has none."""
        raise NotImplementedError


class ChatBody(Conversation, Answered):
    """A conversation that is to be answered."""


def decoding(
    usual: DecodeConfig,
    body: Answered,
    structure: StructureConfig | None = None,
    ignored: Sequence[str] = (),
) -> list[DecodeConfig]:
    """The settings of each answer to a prompt: those of the server, with the request's on top.

    Where a seed was given, each has one of its own. ignored: fields that are not honoured. ApiError
    for what does not go together.
    """
    for i, text in enumerate(body.stops):
        check_text(text, f"{body.stop_field}[{i}]")
    limits = [it for name, it in body.wishes.items() if type(it) is int and name not in ignored]
    asked = body.model_dump(include={*Sampled.model_fields}, exclude_none=True)
    bias = body.logit_bias or {}
    asked["logit_bias"] = tuple((int(token), value) for token, value in bias.items())
    asked["stop_token_ids"] = tuple(body.stop_token_ids or ())
    try:
        config = replace(
            usual,
            method=body.method or usual.method,
            sampling=replace(usual.sampling, **asked),
            max_tokens=usual.max_tokens if body.most is None else max(1, body.most),
            reads_only=body.most == 0,
            structure=structure or usual.structure,
            stop=(*usual.stop, *body.stops),
            logprobs=body.laws[0],
            prompt_logprobs=body.laws[1],
            thought_tokens=min(limits, default=None),
        )
    except DFlashError as error:
        raise of_settings(error) from None
    if (seed := config.sampling.seed) is None:
        return [config] * body.answers
    seeds = [(seed + i) % 2**32 for i in range(body.answers)]
    return [replace(config, sampling=replace(config.sampling, seed=each)) for each in seeds]
