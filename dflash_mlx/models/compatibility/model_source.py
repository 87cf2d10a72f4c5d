"""Where a model's files are: a folder here, or a Hugging Face repository of which none is kept.

Both list their files and read configurations and the heads of weight files, never weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from huggingface_hub import HfApi, get_session, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError, of its HTTP client
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    hf_raise_for_status,
)

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import Finding, Refused
from dflash_mlx.system.safetensors_header import MAX_HEADER, TensorHeader, read_header

MAX_JSON = 64 * 2**20  # bytes; tokenizers have 10 to 35 MiB
FIRST_BYTES = 100_001  # asked for at once; few heads are longer
_COMPLETE = "choose a complete model folder in Hugging Face format"


class ModelSource(Protocol):
    """A model's files before any weight is read. name: what to call it in sentences."""

    @property
    def name(self) -> str:
        """A folder's path or a repository's id."""

    @property
    def files(self) -> Mapping[str, int]:
        """Names and sizes in bytes of the files at its top."""

    def place(self, file: str) -> str:
        """The file in words."""

    def path(self, file: str) -> Path:
        """The whole file on this machine; Refused where it cannot be had."""

    def header(self, file: str, next_step: str) -> dict[str, TensorHeader]:
        """The tensors of a .safetensors file, from its head alone; Refused where damaged."""


class LocalFolder:
    """A folder on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = str(folder)

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Regular files only, links followed; Refused where the folder cannot be listed."""
        try:
            found = [(file.name, file) for file in self.folder.iterdir() if file.is_file()]
            return {name: file.stat().st_size for name, file in sorted(found)}
        except OSError as error:
            what = f"{self.folder} cannot be read ({error.strerror or error})"
            raise Refused(Finding("error", what, _COMPLETE, self.name)) from None

    def place(self, file: str) -> str:
        """Its path."""
        return str(self.folder / file)

    def path(self, file: str) -> Path:
        """The file, whether or not it is there."""
        return self.folder / file

    def header(self, file: str, next_step: str) -> dict[str, TensorHeader]:
        """As `read_header`."""
        return read_header(self.folder / file, next_step)


class Nowhere(LocalFolder):
    """A model without files to look at, of which only the configuration is known."""

    def __init__(self, name: str) -> None:
        super().__init__(Path())
        self.name = name

    @cached_property
    def files(self) -> Mapping[str, int]:
        """None."""
        return {}


class HubRepository:
    """A Hugging Face repository, asked for small files and for the heads of weight files."""

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def files(self) -> Mapping[str, int]:
        """As the hub lists them; Refused without a network or such a repository."""
        try:
            listed = HfApi().model_info(self.name, files_metadata=True, timeout=20).siblings or []
        except (OSError, HTTPError, ValueError) as error:
            raise self._refused(error) from None
        return {f.rfilename: f.size or 0 for f in listed if "/" not in f.rfilename}

    def place(self, file: str) -> str:
        """The file and the repository's id."""
        return f"{self.name}/{file}"

    def path(self, file: str) -> Path:
        """The file in the Hugging Face cache, downloaded if need be."""
        try:
            return Path(hf_hub_download(self.name, file))
        except (OSError, HTTPError, ValueError) as error:
            raise self._refused(error) from None

    def header(self, file: str, next_step: str) -> dict[str, TensorHeader]:
        """By two requests at most, of the head alone; then as `read_header`, with no data."""
        total, place = self.files.get(file, 0), self.place(file)
        try:
            head = self._head(file, total)
        except (OSError, HTTPError, ValueError) as error:
            raise self._refused(error) from None
        with TemporaryDirectory() as folder:
            copy = Path(folder) / "head.safetensors"
            try:
                with open(copy, "wb") as output:
                    output.write(head[:total])
                    output.truncate(total)  # a hole, which takes no place on the disk
            except OSError as error:
                what = f"the head of {place}, a file of {total} bytes, cannot be kept ({error})"
                raise Refused(Finding("error", what, next_step, place)) from None
            return read_header(copy, next_step, place)

    def _head(self, file: str, total: int) -> bytes:
        """At least its size field and its header, where so many bytes can be there."""
        if not total:
            return b""
        found = self._bytes(file, 0, FIRST_BYTES)
        end = 8 + int.from_bytes(found[:8], "little")
        if len(found) < end <= min(total, 8 + MAX_HEADER):
            found += self._bytes(file, len(found), end)
        return found

    def _bytes(self, file: str, begin: int, end: int) -> bytes:
        headers = {**build_hf_headers(), "range": f"bytes={begin}-{end - 1}"}
        response = get_session().get(hf_hub_url(self.name, file), headers=headers, timeout=20)
        hf_raise_for_status(response)
        return bytes(response.content)

    def _refused(self, error: Exception) -> DFlashError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, GatedRepoError):  # which the next one includes
            what = f"{self.name} is open only to those who have accepted its licence"
            step = "accept its licence on the hub and log in"
        elif isinstance(error, RepositoryNotFoundError):
            what, step = f"{self.name!r} is neither a folder nor a public model", "check the name"
        elif isinstance(error, HfHubHTTPError) and not isinstance(error, LocalEntryNotFoundError):
            what, step = f"the hub refuses {self.name} ({reason})", "check the name and your access"
        else:
            what = f"{self.name} is no local folder, and the hub cannot be reached ({reason})"
            step = "check the network connection, or choose a local folder"
        return Refused(Finding("error", what, step, self.name))


def read_json(source: ModelSource, file: str) -> dict[str, Any]:
    """A JSON object of a model's folder.

    Raises Refused for a file that is missing, no regular file, over 64 MiB, or no JSON object.
    """
    place = source.place(file)
    if file not in source.files:
        what = f"{source.name} has no {file}"
    elif source.files[file] > MAX_JSON:
        what = f"{place} has {source.files[file]} bytes, at most {MAX_JSON} are read"
    else:
        try:
            found: Any = json.loads(source.path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            what = f"{place} is no readable {file} ({error})"
        else:
            if isinstance(found, dict):
                return found
            what = f"{place} is a JSON {type(found).__name__}, not an object"
    raise Refused(Finding("error", what, _COMPLETE, place))
