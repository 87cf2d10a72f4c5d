"""A fine-tune may be drafted for by what was trained for its parent, which its model card names.

Drafters carry over within a lineage, if with a little less acceptance. The card is the README.md of
a folder, or of a repository on the hub; what stands between its first two lines of `---` is read as
text, `base_model` and `base_model_relation` alone.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.names import Names, gguf_file, local_folder, whole_copy
from dflash_mlx.models.registry import Entry, registered
from dflash_mlx.models.source import CARD, Source

RELATIONS = ("finetune", "merge", "quantized", "adapter")  # absent is one of them
_MOST = 2**20  # characters of a card that are looked at
_FRONT = re.compile(r"\A\s*---[ \t]*\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
_FIELD = r"^{}:[ \t]*([^\n]*)((?:\n[ \t]*-[ \t]+[^\n]+)*)"


def inherited(names: Names) -> Names:
    """The same with the drafters of the target's parent, where it has none of its own.

    Nothing is asked of the hub about a folder. Where the hub does not answer, nothing changes.
    """
    if names.model is None or names.drafter is not None or names.asks_first:
        return names
    if gguf_file(names.model) is not None:
        return names
    for parent in base_models(_card(names.model)):
        if (entry := registered(parent)) is not None:
            return _with_drafters_of(names, parent, entry)
    return names


def parent_of(folder: Source) -> Entry | None:
    """The entry of the model that a folder says it was made from; None where it has none."""
    entries = (registered(parent) for parent in base_models(_card_in(folder)))
    return next((entry for entry in entries if entry is not None), None)


def base_models(card: str) -> list[str]:
    """What a model with this card was made from: ids, in the card's order."""
    front = _FRONT.match(card[:_MOST])
    text = front[1] if front else ""
    relation = _field(text, "base_model_relation")
    return _field(text, "base_model") if set(relation) <= {*RELATIONS} else []


def _field(text: str, name: str) -> list[str]:
    """The values of a field of YAML, one or a list, without quotation marks and comments."""
    found = re.search(_FIELD.format(name), text, re.MULTILINE)
    if found is None:
        return []
    inline = found[1].partition(" #")[0].strip().strip("[]").split(",")
    below = (line.strip()[1:].partition(" #")[0] for line in found[2].splitlines())
    values = (value.strip().strip("\"'") for value in (*inline, *below))
    return [value for value in values if value]


def _with_drafters_of(names: Names, parent: str, entry: Entry) -> Names:
    note = f"no drafter is known for {names.shown}; it says that it was made from {parent}, whose "
    return replace(
        names,
        drafter=entry.drafter,
        second_drafter=names.second_drafter or entry.second_drafter,
        others=entry.others,
        preset=entry.preset,
        lineage=f"{note}drafter {entry.drafter} is used",
    )


def _card(model: str) -> str:
    """Of a folder or a repository, "" where it has none or the hub does not answer.

    The hub is not asked about a whole copy: that has its card, if it was fetched by this program.
    """
    with suppress(DFlashError):
        if (folder := local_folder(model)) is not None:
            return _card_in(Source.of(folder))
        return _card_in(whole_copy(model) or Source(model))
    return ""


def _card_in(source: Source | None) -> str:
    with suppress(DFlashError, OSError):
        if source is not None and CARD in source.files:
            return source.path(CARD).read_text(encoding="utf-8", errors="replace")
    return ""
