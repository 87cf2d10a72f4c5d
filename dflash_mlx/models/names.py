"""From what a user names to parts of a pair: the registry, shipped ones, folders, ids.

The registry, models.toml, has the public pairs: which drafter goes with which target.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from yaml import YAMLError  # type: ignore[import-untyped]

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from dflash_mlx.core.config import PLAIN, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Preset, Speeds
from dflash_mlx.models.parts import cached_head
from dflash_mlx.models.source import (
    CARD,
    DRAFTER,
    MODEL,
    SECOND_DRAFTER,
    Source,
    how_to_name,
    is_whole,
)

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
SHIPPED = Path(__file__).parents[1] / "data"  # drafters that come with the package

_FILE = Path(__file__).parent / "models.toml"
_CACHED = re.compile(r"^models--.+--(?P<name>.+)$")  # a repository in the Hugging Face cache
_BITS = r"\d+(?:\.\d+)?-?(?:bits?|bpw)|int\d|oq\d+(?:\.\d+)?e?|qx\d+[a-z]?(?:-hi)?|jang[-_]\d[a-z]?"
_FLOATS = r"b?float(?:16|32)|bf16|fp\d+|unquantized"
_BLOCKS = r"(?:q\d(?:[-_][01])?|(?:mx|nv)fp\d)(?:[-_]k(?:[-_](?:xl|[sml]))?)?|mixed[-_]\d[-_]\d"
_RECIPES = r"mlx|gs?\d+|dwq(?:-(?:\d{6}|\d{8}|v\d))?|awq|gptq|optiq|qat|ud"
_HEAD = r"mtp|mtplx(?:-optimized-[a-z]+)?"  # a target whose folder has its head for drafts as well
_QUANTISED = re.compile(rf"(?:[-.](?:{_BITS}|{_FLOATS}|{_BLOCKS}|{_RECIPES}))+$")
_OF_TARGET = re.compile(rf"(?:[-.](?:{_BITS}|{_FLOATS}|{_BLOCKS}|{_RECIPES}|{_HEAD}))+$")
_MAX_CARD = 2**20  # bytes
_RELATIONS = ("finetune", "merge", "quantized", "adapter", None)  # to a base model


# The registry


@dataclass(frozen=True)
class Entry:
    """A public pair; models.toml says what the fields mean."""

    targets: tuple[str, ...]
    drafter: str
    second_drafter: str | None = None
    others: tuple[tuple[str, str], ...] = ()
    method: str = "auto"
    template: tuple[tuple[str, Any], ...] = ()
    notes: str = ""
    billions: float = 0
    active: float = 0
    best_from: float = 0
    verified: bool = False
    sees: bool = False
    alternatives: tuple[str, ...] = ()
    pickled: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.targets[0]

    @property
    def more(self) -> str:
        others = (f"{name} ({family})" for family, name in self.others)
        return ", ".join((*others, *self.alternatives))

    @property
    def preset(self) -> Preset:
        return Preset(self.method, self.template)


UNLISTED = Entry((), "", verified=True)  # of a model that the registry does not have


@cache
def entries() -> tuple[Entry, ...]:
    """All pairs, in the order of the file."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["pair"]
    return tuple(_entry(**row) for row in rows)


def _entry(**row: Any) -> Entry:
    tables = {key: tuple(value.items()) for key, value in row.items() if isinstance(value, dict)}
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return Entry(**(row | tables | lists))


def registered(name: str) -> Entry | None:
    """The entry of a target, by its Hugging Face id or folder; None where it has none.

    The last part counts, whatever its case and what names a quantisation, a dtype or a head for
    drafts at its end. A head alone may be called so too, which its config.json tells.
    """
    wanted = _normalised(name, _OF_TARGET)
    return next((e for e in entries() if wanted in map(_normalised, e.targets)), None)


def instead_of(drafter: str) -> str | None:
    """A drafter in .safetensors files for the target of one that is a pickle; None if unknown."""
    pickled = (pair for entry in entries() for pair in entry.pickled)
    return next((other for name, other in pickled if same_weights(name, drafter)), None)


def same_weights(one: str, other: str) -> bool:
    """Whether two names differ in owner, case and quantisation alone."""
    return _normalised(one) == _normalised(other)


def without_quantisation(name: str) -> str:
    """The last part of a name, without what names a quantisation or a dtype at its end."""
    return re.sub(_QUANTISED.pattern, "", name.rpartition("/")[2], flags=re.IGNORECASE)


def _normalised(name: str, endings: re.Pattern[str] = _QUANTISED) -> str:
    parts = [part for part in re.split(r"[/\\]", name) if part]
    cached = next((found["name"] for part in parts if (found := _CACHED.match(part))), None)
    last = cached or (parts[-1] if parts else "")
    return endings.sub("", last.lower().replace("_", "-").removesuffix(".gguf"))


# The parts of a pair


@dataclass(frozen=True)
class Names:
    """The parts of a pair: ids, folders, or names of what is shipped."""

    model: str | None  # None for the embedded target
    shown: str  # what the target is called
    drafter: str | None = None
    second_drafter: str | None = None
    others: tuple[tuple[str, str], ...] = ()  # drafters of further families, by family
    preset: Preset = Preset()
    asks_first: bool = False  # whether a drafter, or none, was named, and not the registry's
    asks_second: bool = False
    lineage: str = ""  # a sentence, where the drafters are those of what the target was made from
    headless: str = ""  # a sentence, where the target's files lack the head that it was made with
    speeds: Speeds | None = None  # where drafters of several families are on the disk

    @property
    def parts(self) -> list[tuple[str, str]]:
        """The models that have a name, the target first, each with its option."""
        named = (self.model, MODEL), (self.drafter, DRAFTER), (self.second_drafter, SECOND_DRAFTER)
        return [(name, option) for name, option in named if name is not None]


def find_names(config: PairConfig) -> Names:
    """The parts of the pair that `config` asks for; nothing is downloaded.

    Drafters that it does not name come from the registry. Raises DFlashError for
    folders that are not there or damaged, and for a second drafter without a first one.
    """
    found = target_names(config.model)
    if config.drafter == PLAIN:
        found = replace(found, drafter=None, second_drafter=None, others=(), asks_first=True)
    elif config.drafter is not None:
        is_its = found.drafter is not None and same_weights(found.drafter, config.drafter)
        preset = found.preset if is_its else Preset()
        found = replace(found, drafter=config.drafter, others=(), asks_first=True, preset=preset)
    second = config.second_drafter
    if second == PLAIN:
        found = replace(found, second_drafter=None)
    elif second is not None:  # whoever asks for one wants it used
        preset = replace(found.preset, method="d2sd")
        found = replace(found, second_drafter=second, asks_second=True, preset=preset)
    if found.second_drafter is not None and found.drafter is None:
        raise DFlashError("a second drafter needs a first one", "name one with --drafter")
    for name, option in found.parts:
        if option != MODEL and shipped_folder(name, option) is None:
            local_folder(name, option)  # needed or not
    return found


def target_names(model: str | None) -> Names:
    """A target, the embedded one without a name, with the drafters that are known for it."""
    shown = model or DEFAULT_MODEL
    model = None if shown == DEFAULT_MODEL and existing(shown) is None else model
    is_file = model is not None and gguf_file(model) is not None
    if model is not None and not is_file:
        local_folder(model)  # before any download
    entry = registered(shown)
    if entry is None:
        return Names(model, shown)
    return Names(model, shown, entry.drafter, entry.second_drafter, entry.others, entry.preset)


# Where they are


def find_source(name: str, option: str = MODEL, update: bool = True) -> Source:
    """Where `name` is: shipped, a folder, or the hub where no whole copy of it is here.

    option: the command-line option that it came from. A copy is brought up to date; where the hub
    does not answer, everything is downloaded at once, or DFlashError says why it cannot be. Without
    `update` nothing is downloaded and a whole copy stays as it is.
    """
    if (folder := shipped_folder(name, option) or local_folder(name, option)) is not None:
        return Source.of(folder, option)
    copy = whole_copy(name, option)
    there = Source(name, option=option, part=copy.part if copy else ())
    if not update:
        return copy or there
    return there if copy is None and there.answers() else there.fetch()


def existing(name: str) -> Path | None:
    """The file or folder that a user has named, `~` understood; None where there is none.

    Names that nothing can have (too long, a zero byte, the home of no user) are of nothing.
    """
    try:
        path = Path(name or "no name").expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None


def whole_copy(name: str, option: str = MODEL) -> Source | None:
    """A repository in the Hugging Face cache, or its head; None if not whole; asks no network."""
    places = Source(name, option=option).cached(), cached_head(name) if option != MODEL else None
    return next((found for found in places if found is not None and is_whole(found)), None)


def is_here(name: str, option: str = MODEL) -> bool:
    """Whether `name` is shipped, a folder, or a whole repository in the Hugging Face cache."""
    return bool(shipped_folder(name, option) or existing(name) or whole_copy(name, option))


def local_folder(name: str, option: str = MODEL) -> Path | None:
    """The folder `name`, None for what may be a Hugging Face id; DFlashError for neither."""
    if (path := existing(name)) is None:
        step = how_to_name(option)
        if name.endswith(".gguf"):  # a file's name, which is looked for nowhere else
            raise DFlashError(f"there is no file {name[:300]!r}", f"check its path, or {step}")
        try:
            validate_repo_id(name)
        except ValueError:
            raise DFlashError(f"there is no folder {name[:300]!r}", step) from None
    elif not path.is_dir():
        raise DFlashError(f"{name} is a file, not a model folder", how_to_name(option))
    return path


def gguf_file(name: str) -> Path | None:
    """The GGUF file `name`, None where there is no such file."""
    path = existing(name)
    return path if path is not None and path.suffix == ".gguf" and path.is_file() else None


def shipped_folder(name: str, option: str = DRAFTER) -> Path | None:
    """Of a drafter that is shipped, by its name alone; None for other names, and for targets."""
    if option == MODEL or not name or Path(name).name != name:
        return None
    return existing(str(SHIPPED / name / "config.json")) and SHIPPED / name


# What a fine-tune was made from, which its model card, a README.md, names


def inherited(names: Names) -> Names:
    """Names with the drafters of the target's parent, for a target without any of its own.

    The hub is asked for the card of a model that is not here; where it is silent, nothing changes.
    """
    if names.model is None or names.drafter is not None or names.asks_first:
        return names
    with suppress(DFlashError):
        for parent, entry in _known_parents(find_source(names.model, update=False)):
            said = f"no drafter is known for {names.shown}; it says that it was made from {parent},"
            return replace(
                names,
                drafter=entry.drafter,
                second_drafter=names.second_drafter or entry.second_drafter,
                others=entry.others,
                preset=entry.preset,
                lineage=f"{said} whose drafter {entry.drafter} is used",
            )
    return names


def parent_of(folder: Source) -> Entry | None:
    """The entry of the model that a folder says it was made from; None where it has none."""
    return next((entry for _, entry in _known_parents(folder)), None)


def base_models(card: Path) -> list[str]:
    """What a model with this card was made from: ids, in the card's order."""
    try:
        told = metadata_load(card) or {}
    except (OSError, ValueError, TypeError, RecursionError, YAMLError):
        return []
    parents = told.get("base_model")
    named = parents if isinstance(parents, list) else [parents]
    known = told.get("base_model_relation") in _RELATIONS
    return [name for name in named if known and isinstance(name, str) and name]


def _known_parents(model: Source) -> Iterator[tuple[str, Entry]]:
    with suppress(DFlashError):
        has_card = 0 < model.files.get(CARD, 0) <= _MAX_CARD
        for parent in base_models(model.path(CARD)) if has_card else []:
            if (entry := registered(parent)) is not None:
                yield parent, entry
