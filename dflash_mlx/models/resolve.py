"""From names to local folders: Hugging Face ids, folders, pair folders, and what is shipped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError, of its HTTP client
    GatedRepoError,
    HTTPError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Advice
from dflash_mlx.models import pair_folder, registry

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
SHIPPED = Path(__file__).parents[1] / "data"

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]


@dataclass(frozen=True)
class Names:
    """Where the parts of a pair are: ids, folders, or names of what is shipped.

    model: None for the embedded target. shown: what the target is called. asks_first,
    asks_second: whether a drafter was named or is of a pair folder, and not the registry's.
    made_from: the target's name before it was converted, of a pair folder.
    """

    model: str | None
    shown: str
    drafter: str | None = None
    second_drafter: str | None = None
    advice: Advice = Advice()
    asks_first: bool = False
    asks_second: bool = False
    made_from: str = ""


def find_names(config: PairConfig) -> Names:
    """The parts of the pair that `config` asks for; nothing is downloaded.

    Drafters that it does not name come from the pair folder or the registry. Raises DFlashError
    for a damaged pair folder, and for a second drafter without a first one.
    """
    found = target_names(config.model)
    if config.drafter is not None:
        advice = registry.advice(found.made_from or found.shown, config.drafter)
        found = replace(found, drafter=config.drafter, asks_first=True, advice=advice)
    if config.second_drafter == "none":
        found = replace(found, second_drafter=None)
    elif config.second_drafter is not None:  # whoever asks for one wants it used
        advice = replace(found.advice, method="d2sd")
        found = replace(found, second_drafter=config.second_drafter, asks_second=True)
        found = replace(found, advice=advice)
    if found.second_drafter is not None and found.drafter is None:
        raise DFlashError("a second drafter needs a first one", "name one with --drafter")
    return found


def target_names(model: str | None) -> Names:
    """A target, the embedded one without a name, with the drafters that are known for it."""
    shown = model or DEFAULT_MODEL
    if model is not None and is_pair_folder(model):
        return _of_pair_folder(pair_folder.read(Path(model).expanduser()), shown)
    if model is not None:
        local_folder(model, "model")  # at once, not behind the download of a drafter
    entry = registry.find(shown)
    if entry is None:
        return Names(model, shown)
    return Names(model, shown, entry.drafter, entry.second_drafter, entry.advice)


def _of_pair_folder(pair: pair_folder.PairFolder, shown: str) -> Names:
    second = None if pair.second_drafter is None else str(pair.second_drafter)
    target, drafter = pair.names[pair_folder.TARGET], pair.names[pair_folder.DRAFTER]
    advice = registry.advice(target, drafter)
    return Names(str(pair.target), shown, str(pair.drafter), second, advice, True, True, target)


def is_pair_folder(name: str) -> bool:
    """Whether `name` is a folder with a target and its drafters."""
    try:
        return pair_folder.is_pair_folder(Path(name).expanduser())
    except (OSError, RuntimeError, ValueError):  # no such user's home, too long, a zero byte
        return False


def resolve_folder(name: str, option: str) -> Path:
    """The local folder `name`, or a Hugging Face repository's snapshot, downloaded if need be.

    option: the command-line option that `name` came from, for the error message.
    """
    folder = local_folder(name, option)
    if folder is not None:
        return folder
    next_step = _next_step(option)
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, ignore_patterns=["*/*"]))
    except GatedRepoError:
        raise DFlashError(
            f"{name!r} is gated, and this machine has no access to it",
            f"accept its licence on the hub and log in with hf auth login, or {next_step}",
        ) from None
    except RepositoryNotFoundError:
        raise DFlashError(f"{name!r} is neither a folder nor a public model", next_step) from None
    except (OSError, HTTPError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DFlashError(
            f"{name!r} is no local folder and could not be downloaded ({reason})",
            "check the name and the network connection, or " + next_step,
        ) from None


def local_folder(name: str, option: str) -> Path | None:
    """The folder `name`, None for what may be a Hugging Face id; DFlashError for neither."""
    try:
        folder = Path(name or "no name").expanduser()
        if folder.is_dir():
            return folder
        if folder.exists():
            raise DFlashError(f"{name} is a file, not a model folder", _next_step(option))
        validate_repo_id(name)
    except (OSError, RuntimeError, ValueError):  # no such user's home, too long, a zero byte
        raise DFlashError(f"there is no folder {name[:80]!r}", _next_step(option)) from None
    return None


def _next_step(option: str) -> str:
    return f"give a local folder or a Hugging Face id like owner/name with --{option}"


def shipped_folder(name: str) -> Path | None:
    """Of a drafter that is shipped, by its name alone; None for other names."""
    if not name or Path(name).name != name:
        return None
    folder = SHIPPED / name
    try:
        return folder if (folder / "config.json").is_file() else None
    except (OSError, ValueError):  # too long, a zero byte
        return None
