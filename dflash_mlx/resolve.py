"""From names to local folders: Hugging Face ids, folders, and what is shipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError, of its HTTP client
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
)

from dflash_mlx.config import DecodeConfig, PairConfig
from dflash_mlx.errors import DFlashError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_DRAFTER = "smollm2-135m-dflash"
DEFAULT_SECOND_DRAFTER = "smollm2-135m-variable-prefix"
SHIPPED = Path(__file__).parent / "data"

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]


def drafter_folders(config: PairConfig, uses: Sequence[DecodeConfig] = ()) -> list[Path]:
    """The folders of the first drafter and of the second, as many as there are.

    uses: settings that the pair will be used with; without one for d2sd, there is no second.
    """
    first = _drafter_folder(config)
    return [f for f in (first, _second_folder(config, uses)) if f is not None]


def resolve_folder(name: str, option: str) -> Path:
    """The local folder `name`, or a Hugging Face repository's snapshot, downloaded if need be.

    option: the command-line option that `name` came from, for the error message.
    """
    next_step = f"give a local folder or a Hugging Face id like owner/name with --{option}"
    try:
        folder = Path(name or "no name").expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError, ValueError):  # no such user's home, too long, a zero byte
        raise DFlashError(f"there is no folder {name[:80]!r}", next_step) from None
    if is_folder:
        return folder
    if exists:
        raise DFlashError(f"{name} is a file, not a model folder", next_step)
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, ignore_patterns=["*/*"]))
    except HFValidationError:
        raise DFlashError(f"there is no folder {name!r}", next_step) from None
    except RepositoryNotFoundError:
        raise DFlashError(f"{name!r} is neither a folder nor a public model", next_step) from None
    except (OSError, HTTPError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DFlashError(
            f"{name!r} is no local folder and could not be downloaded ({reason})",
            "check the name and the network connection, or " + next_step,
        ) from None


def _drafter_folder(config: PairConfig) -> Path | None:
    if config.drafter is not None:
        return resolve_folder(config.drafter, "drafter")
    return SHIPPED / DEFAULT_DRAFTER if config.model is None else None


def _second_folder(config: PairConfig, uses: Sequence[DecodeConfig]) -> Path | None:
    """The variable-prefix drafter's, where there is one and a method uses it."""
    unused = bool(uses) and all(use.method != "d2sd" for use in uses)
    if config.second_drafter == "none" or unused:
        return None
    if config.second_drafter is not None:
        if _drafter_folder(config) is None:
            raise DFlashError("a second drafter needs a first one", "name one with --drafter")
        return resolve_folder(config.second_drafter, "second-drafter")
    return SHIPPED / DEFAULT_SECOND_DRAFTER if config.model is None else None
