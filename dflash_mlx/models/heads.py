"""Heads that ship inside a target: found in its own folder, and no more of it read or fetched."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.formats import FileFormat
from dflash_mlx.drafters.methods import family_of, format_as_drafter, format_of, formats
from dflash_mlx.models.names import Names
from dflash_mlx.models.source import CONFIG, DRAFTER, INDEX, Source

_NEXT = "choose a complete model folder"


def limited(source: Source, raw: Mapping[str, Any]) -> FileFormat | None:
    """The family of a folder that is given as a drafter's, None where nothing drafts so.

    Of a target's folder that holds a head, `source` keeps only the files that have it.
    """
    if (own := format_of(raw)) is not None or format_as_drafter(raw) is None:
        return own
    places: dict[str, str] = {}
    with suppress(DFlashError):  # the check of its weights says what is wrong
        places = _places(source)
    family = format_as_drafter(raw, places)
    if family is not None and len(wanted := family.own_tensors(dict(raw), places)) < len(places):
        source.part = tuple(dict.fromkeys(places[name] for name in wanted))
    return family


def only_head(source: Source) -> None:
    """Keep of a target's folder what has its head; DFlashError where it has none.

    A drafter's folder stays as it is.
    """
    if not is_drafter(source):
        what = f"{source.name} holds no head for multi-token prediction that is known"
        step = "give the model as its authors published it; conversions often drop its head"
        raise DFlashError(what, step)


def is_drafter(source: Source) -> bool:
    """Whether a folder is a drafter's, or a target's with a head, of which only that is kept."""
    raw = source.read_json(CONFIG)
    limited(source, raw)
    return format_of(raw) is not None or bool(source.part)


def _places(source: Source) -> dict[str, str]:
    """The file of each tensor, by the index where there is one and it names them."""
    named: Any = source.read_json(INDEX).get("weight_map") if INDEX in source.files else None
    places = {str(t): str(f) for t, f in named.items()} if isinstance(named, dict) else {}
    told = set(places.values())
    for file in source.files:
        if fnmatch(file, "*.safetensors") and file not in told:
            places |= dict.fromkeys(source.header(file, _NEXT), file)
    return places


def with_own_head(names: Names, model: Source) -> Names:
    """Names with the head that is in the target's own folder as a drafter, behind known ones.

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
            own = (str(family_of(family)), names.model)
            if names.drafter is None:
                return replace(names, drafter=names.model)
            return replace(names, others=(*names.others, own))
        return replace(names, headless=made_with_one and f"{names.shown} {made_with_one}")
    return names
