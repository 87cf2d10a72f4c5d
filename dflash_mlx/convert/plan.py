"""What is to be converted, what that needs, and the folder that is complete or absent.

Of a Hugging Face repository only the heads of weight files are fetched until all is known to fit.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from dflash_mlx.convert.conversion import (
    Conversion,
    ConvertConfig,
    kind_of,
    plan_drafter,
    plan_target,
)
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import amount
from dflash_mlx.drafters.methods import format_of
from dflash_mlx.models.check import (
    ModelFacts,
    check_drafter,
    check_pair,
    check_target,
    describe_target,
)
from dflash_mlx.models.downloads import check_space, disk_of_cache
from dflash_mlx.models.gguf_target import load_gguf
from dflash_mlx.models.names import TARGET, existing, is_pair_folder, whole_copy, write_pair
from dflash_mlx.models.parts import is_drafter, read_config
from dflash_mlx.models.source import DRAFTER, MODEL, Source
from dflash_mlx.system.files import locked
from dflash_mlx.system.machine import describe_versions

MARGIN = 16_000_000  # bytes left free beside what is written
ALONE = ""  # the part of a conversion that makes no pair: DST itself is its folder

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FREE = "free some space or choose another disk"
_GIVE_WHOLE = "give the model as its authors published it, by its Hugging Face id or folder"
_GIVE = "give a Hugging Face id like owner/name, a local folder or a GGUF file"


@dataclass(frozen=True)
class Plan:
    """The conversions of models, by their folders in the destination."""

    destination: Path
    conversions: Mapping[str, Conversion]

    @property
    def size(self) -> int:
        return sum(each.size for each in self.conversions.values())

    @cached_property
    def download(self) -> int:
        sources = (each.facts.source for each in self.conversions.values())
        return sum(source.missing() for source in sources if source is not None)


def make_plan(names: Mapping[str, str], destination: str, settings: ConvertConfig) -> Plan:
    """Find and check models, named by their folders in the destination; no weight is read."""
    folder = resolve_destination(destination)
    if ALONE in names and settings.drafter_bits is not None:
        what = "--drafter-bits is for the drafter of a pair"
        raise DFlashError(what, "use --bits, or add --pair")
    if settings.mtp and ALONE not in names:
        raise DFlashError("--mtp is for a target alone", "leave out --pair")
    parts = {
        place: find_part(name, settings.mtp, place not in (TARGET, ALONE))
        for place, name in names.items()
    }
    for place, part in parts.items():
        wanted = TARGET if place == TARGET else DRAFTER
        if place != ALONE and kind_of(part) != wanted:
            what = f"{part.name} is a {kind_of(part)}, not a {wanted}"
            raise DFlashError(what, "give the target as SRC and the drafter with --pair")
    return _plan(folder, parts, settings)


def _plan(destination: Path, parts: Mapping[str, ModelFacts], settings: ConvertConfig) -> Plan:
    drafters = [part for part in parts.values() if kind_of(part) == DRAFTER]
    conversions = {}
    for place, part in parts.items():  # the target first
        if kind_of(part) == DRAFTER:
            conversions[place] = plan_drafter(part, settings, place != ALONE)
            continue
        check_pair(part, *drafters).raise_first()
        conversions[place] = plan_target(part, settings)
    return Plan(destination, conversions)


def check_spaces(plan: Plan) -> None:
    """Raise DFlashError where the download, the result, or both on one disk, do not fit."""
    cache, parent = disk_of_cache(), plan.destination.parent
    needed, what = plan.size, str(plan.destination)
    if plan.download:
        check_space(cache, plan.download + MARGIN, "the download", _FREE)
        if os.stat(cache).st_dev == os.stat(parent).st_dev:
            needed, what = needed + plan.download, f"{what} with the download"
    check_space(parent, needed + MARGIN, what, _FREE)


def convert(plan: Plan, settings: ConvertConfig) -> None:
    """Fetch and write what was planned; DFlashError, and no destination, where that fails."""
    if plan.download:
        parts = {place: _fetch(each.facts) for place, each in plan.conversions.items()}
        plan = _plan(plan.destination, parts, settings)
    with staged(plan.destination) as folder:
        _write(plan, folder)


def _write(plan: Plan, folder: Path) -> None:
    for place, conversion in plan.conversions.items():
        if place != ALONE:
            conversion.write_to(folder / place)
            continue
        conversion.write_to(folder / MODEL)
        for file in (folder / MODEL).iterdir():
            file.rename(folder / file.name)
        (folder / MODEL).rmdir()
    if ALONE not in plan.conversions:
        names = {place: each.facts.name for place, each in plan.conversions.items()}
        write_pair(folder, names, describe_versions())


def report(plan: Plan) -> str:
    """What would be done and what it needs, for people."""
    conversions = plan.conversions.values()
    lines = [
        f"{kind_of(each.facts):<9} {each.facts.name}: {each.description}, {amount(each.size)}"
        for each in conversions
    ]
    free = shutil.disk_usage(plan.destination.parent).free
    lines.append(f"disk      {amount(plan.size)} in {plan.destination}; {amount(free)} free")
    if plan.download:
        free = shutil.disk_usage(disk_of_cache()).free
        lines.append(f"download  {amount(plan.download)}; {amount(free)} free for it")
    memory = max(each.memory for each in conversions)
    lines.append(f"memory    at most about {amount(memory)} while converting")
    return "\n".join(lines)


def find_part(name: str, head: bool = False, drafts: bool = False) -> ModelFacts:
    """Find and check a model; DFlashError for what is none, is damaged, or cannot be had.

    head: only the head in a target's folder, DFlashError where there is none. drafts: that head
    where there is one, else the whole model.
    """
    path = existing(name)
    if path is not None and path.is_file():
        _check_gguf(path)
        if head:
            raise DFlashError(f"{name} is a GGUF file, whose heads are not read", _GIVE_WHOLE)
        return describe_target(load_gguf(path)[2], name, path)
    source = _on_hub(name, head or drafts) if path is None else _of_folder(path)
    if head and not is_drafter(source):
        what = f"{source.name} holds no head for multi-token prediction that is known"
        raise DFlashError(what, f"{_GIVE_WHOLE}; conversions often drop its head")
    return _check(source, name, head or (drafts and is_drafter(source)))


def _fetch(facts: ModelFacts) -> ModelFacts:
    if facts.source is None:
        return facts
    try:
        source = facts.source.fetch()
    except DFlashError as error:
        again = "run the same command again, which resumes"
        raise DFlashError(error.what, again) from None
    return _check(source, facts.name, facts.format is not None)


def _check(source: Source, name: str, as_drafter: bool) -> ModelFacts:
    source.option = DRAFTER if as_drafter or format_of(read_config(source)) else MODEL
    facts = (check_target if source.option == MODEL else check_drafter)(source, name)
    facts.raise_first()
    return facts


def _of_folder(folder: Path) -> Source:
    source = Source.of(folder)
    if is_pair_folder(folder):
        raise DFlashError(f"{folder} holds a pair", "give its target or drafter folder as SRC")
    file = next(folder.glob("*.gguf"), None)
    read_config(source, _GIVE if file is None else f"give the GGUF file {file}")
    return source


def _on_hub(name: str, drafts: bool) -> Source:
    """A repository, or its copy here where that is whole and the newest that can be had.

    drafts: of a target's repository only the files with its head, where it has one.
    """
    try:
        if name.endswith(".gguf"):
            raise ValueError(name)
        validate_repo_id(name)
    except ValueError:
        raise DFlashError(f"there is no file or folder {name[:300]!r}", _GIVE) from None
    try:
        source = Source(name)
        as_drafter = is_drafter(source) if drafts else format_of(read_config(source))
        source.option = DRAFTER if as_drafter else MODEL
        return source if source.missing() else source.fetch()
    except DFlashError:
        if (copy := whole_copy(name) or whole_copy(name, DRAFTER)) is None:
            raise
        return copy


def _check_gguf(path: Path) -> None:
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        return
    if path.suffix in _PICKLES:
        problem = f"{path} is not read, because files of its kind can run any program"
        raise DFlashError(problem, "give the folder of the same model with .safetensors files")
    if path.suffix == ".safetensors":
        raise DFlashError(f"{path} is one file of a model", f"give its folder {path.parent}")
    raise DFlashError(f"{path} is not a GGUF file, it begins with {magic!r}", _GIVE)


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
    """A folder that takes the place of `destination` if the block ends well, or else is removed.

    Raises DFlashError where another conversion to it is running, or it cannot be written.
    """
    folder = destination.with_name(f".{destination.name}.partial")
    try:
        folder.mkdir(exist_ok=True)
        with locked(folder, wait=False):
            try:
                for left in folder.iterdir():  # by a conversion that was killed
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                yield folder
                for path in (*folder.rglob("*"), folder):
                    _sync(path)
                os.rename(folder, destination)
                _sync(destination.parent)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
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
