"""What is to be converted, what that needs, and the folder that is complete or absent.

Of a Hugging Face repository only the heads of weight files are fetched until all is known to fit.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_mlx.convert.conversion import Conversion, ConvertConfig, plan
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import amount
from dflash_mlx.drafters.methods import format_of
from dflash_mlx.models.check import ModelFacts, check_drafter, check_target, fetched
from dflash_mlx.models.downloads import check_space, disk_of_cache
from dflash_mlx.models.names import existing, local_folder, whole_copy
from dflash_mlx.models.parts import is_drafter, read_config
from dflash_mlx.models.source import DRAFTER, MODEL, PICKLED, Source
from dflash_mlx.system.files import locked

MARGIN = 16_000_000  # bytes left free beside what is written

_FREE = "free some space or choose another disk"
_GIVE_WHOLE = "give the model as its authors published it, by its Hugging Face id or folder"
_GIVE = "give a Hugging Face id like owner/name or a local folder"
_AS_IT_IS = "--model reads GGUF files as they are; give the folder of the same model here"


def check_spaces(what: Conversion, destination: Path) -> None:
    """Raise DFlashError where the download, the result, or both on one disk, do not fit."""
    cache, parent = disk_of_cache(), destination.parent
    needed, named = what.size, str(destination)
    if what.download:
        check_space(cache, what.download + MARGIN, "the download", _FREE)
        if os.stat(cache).st_dev == os.stat(parent).st_dev:
            needed, named = needed + what.download, f"{named} with the download"
    check_space(parent, needed + MARGIN, f"{named}, {amount(MARGIN)} to spare included,", _FREE)


def convert(what: Conversion, destination: Path, settings: ConvertConfig) -> None:
    """Fetch and write what was planned; DFlashError, and no destination, where that fails."""
    if what.download:
        what = plan(fetched(what.facts), settings)
    with staged(destination) as folder:
        what.write_to(folder)


def report(what: Conversion, destination: Path) -> str:
    """What would be done and what it needs, for people."""
    kind = "target" if what.facts.format is None else DRAFTER
    free = shutil.disk_usage(destination.parent).free
    lines = [
        f"{kind:<9} {what.facts.name}: {what.description}, {amount(what.size)}",
        f"disk      {amount(what.size)} in {destination}; {amount(free)} free",
    ]
    if what.download:
        free = shutil.disk_usage(disk_of_cache()).free
        lines.append(f"download  {amount(what.download)}; {amount(free)} free for it")
    lines.append(f"memory    at most about {amount(what.memory)} while converting")
    return "\n".join(lines)


def find_part(name: str, head: bool = False) -> ModelFacts:
    """Find and check a model; DFlashError for what is none, is damaged, or cannot be had.

    head: only the head in a target's folder, DFlashError where there is none.
    """
    path = existing(name)
    if path is not None and path.is_file():
        raise _refused_file(path)
    folder = local_folder(name)
    source = _on_hub(name, head) if folder is None else _of_folder(folder)
    if head and not is_drafter(source):
        what = f"{source.name} holds no head for multi-token prediction that is known"
        raise DFlashError(what, f"{_GIVE_WHOLE}; conversions often drop its head")
    source.option = DRAFTER if head or format_of(read_config(source)) else MODEL
    facts = (check_target if source.option == MODEL else check_drafter)(source, name)
    facts.raise_first()
    return facts


def _of_folder(folder: Path) -> Source:
    source = Source.of(folder)
    file = next(folder.glob("*.gguf"), None)
    read_config(source, _GIVE if file is None else _AS_IT_IS)
    return source


def _on_hub(name: str, head: bool) -> Source:
    """A repository, or its copy here where that is whole and the newest that can be had.

    head: of a target's repository only the files with its head, where it has one.
    """
    try:
        source = Source(name)
        as_drafter = is_drafter(source) if head else format_of(read_config(source))
        source.option = DRAFTER if as_drafter else MODEL
        return source if source.missing() else source.fetch()
    except DFlashError:
        if (copy := whole_copy(name) or whole_copy(name, DRAFTER)) is None:
            raise
        return copy


def _refused_file(path: Path) -> DFlashError:
    if path.suffix == ".gguf":
        return DFlashError(f"{path} is not converted", _AS_IT_IS)
    if any(path.match(kind) for kind in PICKLED):
        problem = f"{path} is not read, because files of its kind can run any program"
        return DFlashError(problem, "give the folder of the same model with .safetensors files")
    return DFlashError(f"{path} is a file", _GIVE)


# A folder that is complete or absent, whatever ends its writing


def resolve_destination(name: str) -> Path:
    """The folder to be made; DFlashError unless it is absent or empty and its parent is there."""
    elsewhere = "name a folder that does not exist yet as DST"
    try:
        destination = Path(name).expanduser().resolve()
        if destination.exists() and not destination.is_dir():
            raise DFlashError(f"{destination} is a file", elsewhere)
        if destination.is_dir() and (found := next(destination.iterdir(), None)) is not None:
            raise DFlashError(f"{destination} is not empty, it holds {found.name}", elsewhere)
        parent_is_there = destination.parent.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such home, a zero byte
        raise DFlashError(f"{name[:80]!r} cannot be DST ({error})", elsewhere) from None
    if not parent_is_there:
        raise DFlashError(f"there is no folder {destination.parent}", "create it, or change DST")
    return destination


@contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """A folder to be made that takes the place of `destination` if the block ends well.

    If not, nothing is left of it. Raises DFlashError where another conversion to `destination` is
    running, or it cannot be written.
    """
    place = destination.with_name(f".{destination.name}.partial")
    folder = place / MODEL
    try:
        place.mkdir(exist_ok=True)
        with locked(place, wait=False):
            try:
                if folder.exists():  # of a conversion that was killed
                    shutil.rmtree(folder)
                yield folder
                for path in (*folder.rglob("*"), folder):
                    _sync(path)
                os.rename(folder, destination)
                _sync(destination.parent)
            finally:
                shutil.rmtree(place, ignore_errors=True)
    except BlockingIOError:
        what = f"{destination} is being written by another conversion"
        raise DFlashError(what, "wait until it has finished, or choose another DST") from None
    except OSError as error:
        step = "free some space, or choose another DST; nothing was left behind"
        what = f"{destination} cannot be written ({error.strerror or error})"
        raise DFlashError(what, step) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
