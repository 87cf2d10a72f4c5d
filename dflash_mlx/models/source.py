"""Where a model is: a folder on this machine, or a Hugging Face repository of which none is kept.

Either way a source lists its files and reads configurations and the heads of weight files, and
`fetch` makes a folder of it. The patterns say which files are ever downloaded: none that can run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_session, hf_hub_download, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError, of its HTTP client
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    SafetensorsParsingError,
)
from tqdm.auto import tqdm

from dflash_mlx.core.errors import DFlashError, in_one_line
from dflash_mlx.core.text import amount
from dflash_mlx.system.safetensors_header import TensorHeader, judge, read_header

BESIDE = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")  # what is not weights
LICENCES = ("LICENSE*", "NOTICE*")  # kept with what they are of, but no need of loading
CARD = "README.md"  # says what a model was made from
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
MODEL, DRAFTER, SECOND_DRAFTER = "model", "drafter", "second-drafter"  # options that name models
HUB_ERRORS = (OSError, HTTPError, ValueError)

_MAX_JSON = 64 * 2**20  # bytes; tokenizers have 10 to 35 MiB
_SECONDS = 20  # until a hub that is silent is given up
_COMPLETE = "choose a complete model folder in Hugging Face format"


class NoBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A progress bar that shows nothing."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{**keywords, "disable": True})


@dataclass
class Source:
    """A model's files before any weight is read."""

    name: str  # a repository's id, or the folder's path
    folder: Path | None = None  # None where the files are on the hub
    option: str = ""  # the command-line option that names such a model, "" where none does

    @classmethod
    def of(cls, folder: Path, option: str = "") -> Source:
        return cls(str(folder), folder, option)

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Names and sizes of the files at its top; DFlashError where they cannot be listed."""
        if self.folder is None:
            with self._asking():
                found = HfApi().model_info(self.name, files_metadata=True, timeout=_SECONDS)
            listed = found.siblings or ()
            return {f.rfilename: f.size or 0 for f in listed if "/" not in f.rfilename}
        try:
            here = [(file.name, file) for file in self.folder.iterdir() if file.is_file()]
            return {name: file.stat().st_size for name, file in sorted(here)}
        except OSError as error:
            what = f"{self.folder} cannot be read ({error.strerror or error})"
            raise DFlashError(what, _COMPLETE) from None

    @property
    def weights(self) -> str:
        """What its weight files are called; mlx-lm reads no others of a target."""
        return "model*.safetensors" if self.option == MODEL else "*.safetensors"

    @property
    def here(self) -> Path:
        assert self.folder is not None
        return self.folder

    def place(self, file: str) -> str:
        return f"{self.name}/{file}"

    def path(self, file: str) -> Path:
        """The file on this machine, downloaded if need be; DFlashError where it cannot be had."""
        if self.folder is not None:
            return self.folder / file
        with self._asking():
            return Path(hf_hub_download(self.name, file))

    def read_json(self, file: str, next_step: str = _COMPLETE) -> dict[str, Any]:
        """A JSON object; DFlashError for a file that is missing, too large or anything else."""
        if file not in self.files:
            raise DFlashError(f"{self.name} has no {file}", next_step)
        try:
            if (size := self.files[file]) > _MAX_JSON:
                raise ValueError(f"it has {size} bytes, at most {_MAX_JSON} are read")
            found: Any = json.loads(self.path(file).read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError(f"it is a JSON {type(found).__name__}, not an object")
        except (OSError, ValueError, RecursionError) as error:
            what = f"{self.place(file)} is no readable {file} ({error})"
            raise DFlashError(what, next_step) from None
        return found

    def header(self, file: str, next_step: str) -> dict[str, TensorHeader]:
        """The tensors of a .safetensors file, from its head alone; DFlashError where damaged."""
        if self.folder is not None:
            return read_header(self.folder / file, next_step)
        place = self.place(file)
        try:
            with self._asking():
                head = HfApi().parse_safetensors_file_metadata(self.name, file, timeout=_SECONDS)
        except (SafetensorsParsingError, AttributeError, TypeError, RecursionError) as error:
            raise DFlashError(f"{place} is damaged ({in_one_line(error)})", next_step) from None
        entries = {name: vars(tensor) for name, tensor in head.tensors.items()}
        return judge(entries, self.files.get(file, 0), next_step, place)

    def cached(self) -> Source | None:
        """What the Hugging Face cache has of the repository; None where files are known to lack."""
        try:  # where the hub's listing was kept, this compares with it
            found = self._snapshot([*BESIDE, self.weights], local_files_only=True)
            return Source.of(Path(found), self.option)
        except HUB_ERRORS:
            return None

    def fetch(self) -> Source:
        """This model as a folder, downloaded or up to date; DFlashError where that fails."""
        if self.folder is not None:
            return self
        with self._asking():
            found = self._snapshot([*BESIDE, *LICENCES, CARD, self.weights])
        return Source.of(Path(found), self.option)

    def missing(self) -> int:
        return sum(self.to_come().values())

    def to_come(self) -> dict[str, int]:
        """Files that `fetch` would download and their bytes, the small ones first."""
        if self.folder is not None:
            return {}
        wanted = [*BESIDE, *LICENCES, CARD, self.weights]
        with self._asking():
            files = self._snapshot(wanted, dry_run=True, tqdm_class=NoBar)
        sizes = {file.filename: file.file_size or 0 for file in files if file.will_download}
        return dict(sorted(sizes.items(), key=lambda item: item[1]))

    def fetch_file(self, file: str, bar: type) -> None:
        """Download one file. bar: a class like tqdm; what its `update` raises ends the download."""
        with self._asking():
            hf_hub_download(self.name, file, tqdm_class=bar)

    def _snapshot(self, wanted: list[str], **how: Any) -> Any:
        return snapshot_download(self.name, allow_patterns=wanted, ignore_patterns=["*/*"], **how)

    def answers(self) -> bool:
        """Whether the hub lists the repository's files and hands out its configuration."""
        try:
            return CONFIG not in self.files or self.path(CONFIG).is_file()
        except DFlashError:
            return False

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except HUB_ERRORS as error:
            raise self._refused(error) from None

    def _refused(self, error: Exception) -> DFlashError:
        """What the hub's client says, in a sentence; behind its first line come links."""
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        step = how_to_name(self.option)
        if isinstance(error, GatedRepoError):  # which the next one includes
            what = f"{self.name} is open only to those who have accepted its licence"
            step = f"accept its licence on the hub and log in with hf auth login, or {step}"
        elif isinstance(error, RepositoryNotFoundError):
            what = f"{self.name!r} is neither a folder nor a public model"
        elif isinstance(error, HfHubHTTPError) and not isinstance(error, LocalEntryNotFoundError):
            what = f"the hub refuses {self.name} ({reason})"
            step = f"check the name and your access, or {step}"
        else:
            what = f"{self.name} is no local folder and could not be downloaded, since the hub "
            what += f"cannot be reached ({reason})"
            step = f"check the network connection and the name, or {step}"
        return DFlashError(what, step)


def published(author: str, text: str) -> list[str]:
    """Ids of an author's repositories with `text` in their names; [] where the hub says nothing."""
    try:  # the first request fails at once where the second would try again for 20 seconds
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
        return [found.id for found in HfApi().list_models(author=author, search=text, limit=100)]
    except HUB_ERRORS:
        return []


def cache_folder() -> Path:
    """Of the Hugging Face cache, as it is set now; it need not exist."""
    return Path(constants.HF_HUB_CACHE).expanduser()


def disk_of_cache() -> Path:
    """The folder of the Hugging Face cache, or the nearest one above it that is there."""
    folder = cache_folder()
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


def check_space(folder: Path, wanted: int, what: str, next_step: str) -> None:
    """Raise DFlashError unless `wanted` bytes, for `what`, fit on the disk of `folder`."""
    if (free := shutil.disk_usage(folder).free) < wanted:
        problem = f"{what} needs {amount(wanted)}, and {folder} has {amount(free)} free"
        raise DFlashError(problem, next_step)


def how_to_name(option: str) -> str:
    """What to do about a name that is of no model."""
    where = f" with --{option}" if option else ""
    return f"give a local folder or a Hugging Face id like owner/name{where}"
