"""Conversations with pictures to prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.vision.eyes import Eyes
from dflash_mlx.vision.pictures import Picture
from dflash_mlx.vision.pieces import Look, Sight
from dflash_mlx.vision.positions import Table

_STEP = "ask in words alone, or choose another model"


def read_prompt(
    target: Any,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    salt: str = "",
    /,
    **template_options: Any,
) -> Prompt:
    """The prompt of a conversation in which pictures are among the parts of messages' contents.

    target: one that sees. salt: of who asks, see `Eyes.look`. template_options: of the chat
    template. DFlashError where it or the model's processor does not take these pictures.
    """
    eyes, options = target.eyes, template_options
    pictures: list[Picture] = [
        part["picture"]
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image"
    ]
    alone = _written(eyes, tokenizer, [{"role": "user", "content": [{"type": "image"}]}], {})
    inputs = eyes.process(_written(eyes, tokenizer, messages, options), pictures)
    places = eyes.places(inputs)
    counts = [eyes.count(picture, alone, salt) for picture in pictures]
    if sum(counts) != len(places) or not all(counts):
        what = f"{len(pictures)} pictures take {sum(counts)} places, but the conversation has "
        what += f"{len(places)} as {target.name} writes it, by its chat template or in its words"
        raise DFlashError(what, _STEP)
    table, bounds = eyes.table(inputs), pairwise(accumulate(counts, initial=0))
    pieces = [
        _sight(eyes, picture, partial(eyes.look, picture, alone, salt), places[first:last], table)
        for picture, (first, last) in zip(pictures, bounds, strict=True)
    ]
    return Prompt(tuple(inputs["input_ids"][0].tolist()), tuple(pieces))


def _sight(
    eyes: Eyes, picture: Picture, look: Callable[[], Look], places: list[int], table: Table | None
) -> Sight:
    """A picture at these places."""

    def rows() -> mx.array:
        return look().rows

    length = places[-1] + 1 - places[0]
    digest, whole = eyes.key(picture), eyes.mutual
    return Sight(places[0], length, digest, rows, whole, look, tuple(places), table)


def _written(
    eyes: Eyes, tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    """The conversation as text, in which each picture is a placeholder."""
    shown = [
        {**message, "content": [_shown(part) for part in content]}
        if not isinstance(content := message["content"], str)
        else message
        for message in messages
    ]
    template = None
    if not tokenizer.has_chat_template:
        template = getattr(eyes.processor, "chat_template", None)
        if template is None:
            raise DFlashError(f"{eyes.name} has no chat template", _STEP)
    given = {"add_generation_prompt": True, **options, "tokenize": False}
    given |= {"chat_template": template} if template else {}
    return tokenizer.apply_chat_template(shown, **given)  # type: ignore[no-any-return]


def _shown(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part["type"] == "image" else dict(part)
