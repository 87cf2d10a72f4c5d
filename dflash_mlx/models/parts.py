"""Of a target's folder that is given as a drafter's, the part that drafts: its head.

No more of it is read or fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatch
from typing import Any

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.formats import FileFormat
from dflash_mlx.drafters.methods import format_as_drafter, format_of, formats
from dflash_mlx.models.source import CONFIG, DRAFTER, INDEX, Source

ADAPTER = "adapter_config.json"  # of low-rank adapters, by mlx-lm or peft
_NEXT = "choose a complete model folder in Hugging Face format"


def read_config(source: Source, next_step: str = _NEXT) -> dict[str, Any]:
    """A folder's config.json; DFlashError where it has none, or is an adapter of a model."""
    if ADAPTER in source.files and not any(fnmatch(f, "model*.safetensors") for f in source.files):
        told = source.read_json(ADAPTER)
        base = str(told.get("model") or told.get("base_model_name_or_path") or "its model")[:200]
        fused = f"mlx_lm.fuse --model {base} --adapter-path {source.name} --save-path FOLDER"
        if "peft_type" in told:
            fused = "with peft, merge_and_unload() and save_pretrained(FOLDER)"
        step = f"fuse it first ({fused}), then give that folder"
        raise DFlashError(f"{source.name} is an adapter of {base}, not a whole model", step)
    return source.read_json(CONFIG, next_step)


def limited(source: Source, raw: Mapping[str, Any]) -> FileFormat | None:
    """The family of a folder that is given as a drafter's, None where nothing drafts so.

    Of a target's folder that holds a head, `source` keeps only the files that have it, unless it is
    for the whole model.
    """
    if (own := format_of(raw)) is not None or format_as_drafter(raw) is None:
        return own
    if source.whole_model:
        reading = (each for each in formats() if each.whole_models and each.reads_target(raw))
        return next(reading, None)
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
    raw = read_config(source)
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


def cached_head(name: str) -> Source | None:
    """Of a repository what the Hugging Face cache has of a head; None where that is not whole."""
    here = Source(name, option=DRAFTER, part=(CONFIG,)).cached()
    if here is None or CONFIG not in here.files:
        return None
    with suppress(DFlashError):
        limited(here, here.read_json(CONFIG))
        if here.part and Source(name, option=DRAFTER, part=here.part).cached() is not None:
            return here
    return None
