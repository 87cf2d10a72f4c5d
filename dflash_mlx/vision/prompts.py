"""Conversations with pictures to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.vision.pictures import Picture
from dflash_mlx.vision.pieces import Sight

_STEP = "ask in words alone, or choose another model"


def read_prompt(
    target: Any, tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template_options: Any
) -> Prompt:
    """The prompt of a conversation in which pictures are among the parts of messages' contents.

    target: one that sees. template_options: of the chat template. Raises DFlashError where
    the model's template or processor does not take these pictures.
    """
    eyes, options = target.eyes, template_options
    pictures: list[Picture] = [
        part["picture"]
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image"
    ]
    alone = _written(eyes, tokenizer, [{"role": "user", "content": [{"type": "image"}]}], options)
    inputs = eyes.process(_written(eyes, tokenizer, messages, options), pictures)
    places = eyes.places(inputs)
    counts = [eyes.count(picture, alone) for picture in pictures]
    if sum(counts) != len(places) or not all(counts):
        what = f"the chat template of {target.name} has no place for {len(pictures)} pictures"
        raise DFlashError(f"{what} where they stand", _STEP)
    table = eyes.table(inputs)
    pieces = []
    of_each = zip(pictures, pairwise(accumulate(counts, initial=0)), strict=True)
    for picture, (first, last) in of_each:
        own = tuple(places[first:last])
        look = partial(eyes.look, picture, alone)
        pieces.append(
            Sight(
                own[0],
                own[-1] + 1 - own[0],
                eyes.key(picture),
                lambda look=look: look().rows,  # type: ignore[misc]
                eyes.mutual,
                look,
                own,
                table,
            )
        )
    return Prompt(tuple(inputs["input_ids"][0].tolist()), tuple(pieces))


def _written(
    eyes: Any, tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
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
