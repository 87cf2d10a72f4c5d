"""From what a user names to sources: pair folders, the registry, what is shipped, folders, ids.

The registry is models.toml, the public pairs: which drafter goes with which target.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from dflash_mlx.core.config import PLAIN, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Advice
from dflash_mlx.models import pair_folder
from dflash_mlx.models.pair_folder import DRAFTER, SECOND_DRAFTER, TARGET, is_pair_folder
from dflash_mlx.models.source import MODEL, Source, how_to_name
from dflash_mlx.models.weight_files import is_whole
from dflash_mlx.system.files import existing

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
SHIPPED = Path(__file__).parents[1] / "data"  # drafters that come with the package

_FILE = Path(__file__).parent / "models.toml"
_CACHED = re.compile(r"^models--.+--(?P<name>.+)$")  # a repository in the Hugging Face cache
_BITS = r"\d+(?:\.\d+)?-?(?:bits?|bpw)|int\d|q\d"
_FLOATS = r"b?float(?:16|32)|bf16|(?:mx|nv)?fp\d+"
_RECIPES = r"mlx|gs\d+|dwq(?:-\d{6})?|awq|gptq|optiq"
_QUANTISED = re.compile(rf"(?:-(?:{_BITS}|{_FLOATS}|{_RECIPES}))+$")


@dataclass(frozen=True)
class Entry:
    """A public pair; models.toml says what the fields mean."""

    targets: tuple[str, ...]
    drafter: str
    second_drafter: str | None = None
    others: tuple[tuple[str, str], ...] = ()
    pickled: tuple[tuple[str, str], ...] = ()
    method: str = "auto"
    template: tuple[tuple[str, Any], ...] = ()
    notes: str = ""
    billions: float = 0

    @property
    def name(self) -> str:
        """Of its target, for lists."""
        return self.targets[0]

    @property
    def advice(self) -> Advice:
        """How the pair is best used."""
        return Advice(self.method, self.template)


@cache
def entries() -> tuple[Entry, ...]:
    """All pairs, in the order of the file."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["pair"]
    return tuple(_entry(**row) for row in rows)


def _entry(targets: list[str], **row: Any) -> Entry:
    tables = {key: tuple(value.items()) for key, value in row.items() if isinstance(value, dict)}
    return Entry(tuple(targets), **(row | tables))


def registered(name: str) -> Entry | None:
    """The entry of a target, None where it has none.

    name: a Hugging Face id or a folder. Its last part counts, whoever the owner is, without upper
    case and without what names a quantisation or a dtype at its end. The whole rest must be equal:
    another release, size or tuning is another model.
    """
    wanted = _normalised(name)
    return next((e for e in entries() if wanted in map(_normalised, e.targets)), None)


def unpickled(name: str) -> str:
    """Another upload of a drafter that is known to be pickled, "" where none is known."""
    known = (pair for entry in entries() for pair in entry.pickled)
    return next((other for first, other in known if same_weights(first, name)), "")


def same_weights(one: str, other: str) -> bool:
    """Whether two names differ in owner, case and quantisation alone, as of `registered`."""
    return _normalised(one) == _normalised(other)


def without_quantisation(name: str) -> str:
    """The last part of a name, without what names a quantisation or a dtype at its end."""
    return re.sub(_QUANTISED.pattern, "", name.rpartition("/")[2], flags=re.IGNORECASE)


def _advice(target: str, drafter: str) -> Advice:
    """For this pair, as far as it is known; names as of `registered`, of the drafter likewise."""
    entry = registered(target)
    is_its = entry is not None and _normalised(entry.drafter) == _normalised(drafter)
    return entry.advice if entry is not None and is_its else Advice()


def _normalised(name: str) -> str:
    parts = [part for part in re.split(r"[/\\]", name) if part]
    cached = next((found["name"] for part in parts if (found := _CACHED.match(part))), None)
    last = cached or (parts[-1] if parts else "")
    return _QUANTISED.sub("", last.lower().replace("_", "-"))


@dataclass(frozen=True)
class Names:
    """The parts of a pair: ids, folders, or names of what is shipped.

    model: None for the embedded target. shown: what the target is called. others: drafters of
    further families, by family. asks_first,
    asks_second: whether a drafter was named, or none, and not the registry's.
    made_from: the target's name before it was converted, of a pair folder.
    """

    model: str | None
    shown: str
    drafter: str | None = None
    second_drafter: str | None = None
    others: tuple[tuple[str, str], ...] = ()
    advice: Advice = Advice()
    asks_first: bool = False
    asks_second: bool = False
    made_from: str = ""


def find_names(config: PairConfig) -> Names:
    """The parts of the pair that `config` asks for; nothing is downloaded.

    Drafters that it does not name come from the pair folder or the registry, none by the name of
    "none". Raises DFlashError
    for names of folders that are not there, for a damaged pair folder, and for a second drafter
    without a first one.
    """
    found = target_names(config.model)
    if config.drafter == PLAIN:
        found = replace(found, drafter=None, second_drafter=None, others=(), asks_first=True)
    elif config.drafter is not None:
        advice = _advice(found.made_from or found.shown, config.drafter)
        found = replace(found, drafter=config.drafter, others=(), asks_first=True, advice=advice)
    second = config.second_drafter
    if second == PLAIN:
        found = replace(found, second_drafter=None)
    elif second is not None:  # whoever asks for one wants it used
        advice = replace(found.advice, method="d2sd")
        found = replace(found, second_drafter=second, asks_second=True, advice=advice)
    if found.second_drafter is not None and found.drafter is None:
        raise DFlashError("a second drafter needs a first one", "name one with --drafter")
    for name, option in ((found.drafter, "drafter"), (found.second_drafter, "second-drafter")):
        if name is not None and shipped_folder(name, option) is None:
            local_folder(name, option)  # needed or not
    return found


def target_names(model: str | None) -> Names:
    """A target, the embedded one without a name, with the drafters that are known for it."""
    shown = model or DEFAULT_MODEL
    is_file = model is not None and gguf_file(model) is not None
    folder = None if model is None or is_file else local_folder(model)  # before any download
    if folder is not None and is_pair_folder(folder):
        made_from = pair_folder.read(folder)
        parts = {part: str(folder / part) for part in made_from}
        advice = _advice(made_from[TARGET], made_from[DRAFTER])
        drafters = parts[DRAFTER], parts.get(SECOND_DRAFTER)
        return Names(parts[TARGET], shown, *drafters, (), advice, True, True, made_from[TARGET])
    entry = registered(shown)
    if entry is None:
        return Names(model, shown)
    return Names(model, shown, entry.drafter, entry.second_drafter, entry.others, entry.advice)


def find_source(name: str, option: str = MODEL, update: bool = True) -> Source:
    """Where `name` is: shipped, a folder, or the hub where no whole copy of it is here.

    option: the command-line option that it came from. A copy is brought up to date; where the hub
    does not answer, everything is downloaded at once, or DFlashError says why it cannot be. Without
    `update` nothing is downloaded and a whole copy stays as it is.
    """
    if (folder := shipped_folder(name, option) or local_folder(name, option)) is not None:
        return Source.of(folder, option)
    there, copy = Source(name, option=option), whole_copy(name, option)
    if not update:
        return copy or there
    return there if copy is None and there.answers() else there.fetch()


def whole_copy(name: str, option: str = MODEL) -> Source | None:
    """A repository in the Hugging Face cache, None where it is not whole; asks no network."""
    found = Source(name, option=option).cached()
    return found if found is not None and is_whole(found) else None


def local_folder(name: str, option: str = MODEL) -> Path | None:
    """The folder `name`, None for what may be a Hugging Face id; DFlashError for neither."""
    if (path := existing(name)) is None:
        try:
            validate_repo_id(name)
        except ValueError:
            raise DFlashError(f"there is no folder {name[:300]!r}", how_to_name(option)) from None
    elif not path.is_dir():
        raise DFlashError(f"{name} is a file, not a model folder", how_to_name(option))
    return path


def gguf_file(name: str) -> Path | None:
    """The GGUF file `name`, None where there is no such file."""
    path = existing(name)
    return path if path is not None and path.suffix == ".gguf" and path.is_file() else None


def resolve_folder(name: str, option: str) -> Path:
    """The local folder `name`, or a repository's snapshot, downloaded if need be."""
    return local_folder(name, option) or Source(name, option=option).fetch().here


def shipped_folder(name: str, option: str = "drafter") -> Path | None:
    """Of a drafter that is shipped, by its name alone; None for other names, and for targets."""
    if option == MODEL or not name or Path(name).name != name:
        return None
    return existing(str(SHIPPED / name / "config.json")) and SHIPPED / name
