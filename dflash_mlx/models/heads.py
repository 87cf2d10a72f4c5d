"""The head in a target's own folder as a drafter of the pair."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import formats
from dflash_mlx.models.names import Names
from dflash_mlx.models.parts import limited
from dflash_mlx.models.source import CONFIG, DRAFTER, Source


def with_own_head(names: Names, model: Source) -> Names:
    """Names with the head in the target's own folder as a drafter, in place of a known one's.

    Or with where to get one, where the folder lacks it. model: where the target is; a folder that
    cannot be read changes nothing.
    """
    if names.model is None or names.asks_first:
        return names
    with suppress(DFlashError):
        source = replace(model, option=DRAFTER)
        raw = source.read_json(CONFIG)
        made_with_one = next(filter(None, (each.lacking(raw) for each in formats())), "")
        family = limited(source, raw) if made_with_one else None
        if family is not None and source.part:
            if names.drafter is None:
                return replace(names, drafter=names.model)
            others = {**dict(names.others), family.family: names.model}
            return replace(names, others=tuple(others.items()))
        return replace(names, headless=made_with_one and f"{names.shown} {made_with_one}")
    return names
