"""From what a user names to sources: pair folders, the registry, what is shipped, folders, ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from dflash_mlx.core.config import PLAIN, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Preset
from dflash_mlx.models import pair_folder
from dflash_mlx.models.pair_folder import DRAFTER, SECOND_DRAFTER, TARGET, is_pair_folder
from dflash_mlx.models.registry import preset_for, registered
from dflash_mlx.models.source import MODEL, Source, how_to_name
from dflash_mlx.models.weight_files import is_whole
from dflash_mlx.system.files import existing

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
SHIPPED = Path(__file__).parents[1] / "data"  # drafters that come with the package


@dataclass(frozen=True)
class Names:
    """The parts of a pair: ids, folders, or names of what is shipped.

    model: None for the embedded target. shown: what the target is called. others: drafters of
    further families, by family. asks_first, asks_second: whether a drafter was named, or none, and
    not the registry's. made_from: the target's name before it was converted, of a pair folder.
    lineage: a sentence, where the drafters are those of what the target was made from.
    """

    model: str | None
    shown: str
    drafter: str | None = None
    second_drafter: str | None = None
    others: tuple[tuple[str, str], ...] = ()
    preset: Preset = Preset()
    asks_first: bool = False
    asks_second: bool = False
    made_from: str = ""
    lineage: str = ""

    @property
    def parts(self) -> list[tuple[str, str]]:
        """The models that have a name, the target first, each with its option."""
        named = (self.model, MODEL), (self.drafter, DRAFTER), (self.second_drafter, SECOND_DRAFTER)
        return [(name, option) for name, option in named if name is not None]


def find_names(config: PairConfig) -> Names:
    """The parts of the pair that `config` asks for; nothing is downloaded.

    Drafters that it does not name come from the pair folder or the registry, none by the name of
    "none". Raises DFlashError for names of folders that are not there, for a damaged pair folder,
    and for a second drafter without a first one.
    """
    found = target_names(config.model)
    if config.drafter == PLAIN:
        found = replace(found, drafter=None, second_drafter=None, others=(), asks_first=True)
    elif config.drafter is not None:
        preset = preset_for(found.made_from or found.shown, config.drafter)
        found = replace(found, drafter=config.drafter, others=(), asks_first=True, preset=preset)
    second = config.second_drafter
    if second == PLAIN:
        found = replace(found, second_drafter=None)
    elif second is not None:  # whoever asks for one wants it used
        preset = replace(found.preset, method="d2sd")
        found = replace(found, second_drafter=second, asks_second=True, preset=preset)
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
        preset = preset_for(made_from[TARGET], made_from[DRAFTER])
        drafters = parts[DRAFTER], parts.get(SECOND_DRAFTER)
        return Names(parts[TARGET], shown, *drafters, (), preset, True, True, made_from[TARGET])
    entry = registered(shown)
    if entry is None:
        return Names(model, shown)
    return Names(model, shown, entry.drafter, entry.second_drafter, entry.others, entry.preset)


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
