"""What is to be converted: a local folder, a GGUF file or a Hugging Face repository."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from dflash_mlx.convert.writing import head
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.check import DrafterFacts, TargetFacts, check_drafter, check_target
from dflash_mlx.models.names import whole_copy
from dflash_mlx.models.pair_folder import DRAFTER, TARGET, is_pair_folder
from dflash_mlx.models.source import CONFIG, MODEL, Source
from dflash_mlx.models.target_config import is_drafter
from dflash_mlx.system.files import existing

_CONFIGS = (CONFIG, "generation_config.json", "hf_quant_config.json")  # what mlx-lm builds from
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_GIVE = "give a Hugging Face id like owner/name, a local folder or a GGUF file"


@dataclass(frozen=True)
class Part:
    """A model to be converted, found and checked.

    path: its folder, or its GGUF file. facts: None of a GGUF file, which is checked when it is
    read. has_weights: False where only headers are here, and in the folder nothing is behind them.
    download: bytes still to be fetched.
    """

    name: str
    path: Path
    facts: TargetFacts | DrafterFacts | None = None
    has_weights: bool = True
    download: int = 0

    @property
    def kind(self) -> str:
        """TARGET or DRAFTER."""
        return DRAFTER if isinstance(self.facts, DrafterFacts) else TARGET

    @property
    def files(self) -> Mapping[str, int]:
        """Names and sizes of the files in its folder, here or on the hub."""
        return {} if self.facts is None or self.facts.source is None else self.facts.source.files


def open_part(name: str, scratch: Path) -> Part:
    """Find and check `name`, and of a repository that is not here no more than the headers.

    scratch: an empty folder for these. Raises DFlashError for what is no model, is damaged, or
    cannot be had.
    """
    path = existing(name)
    if path is not None and path.is_file():
        _check_gguf(path)
        return Part(name, path)
    source = _on_hub(name) if path is None else _of_folder(path)
    facts = _check(source, name)
    if source.folder is not None:
        return Part(name, source.folder, facts)
    _write_heads(facts, source, scratch)
    return Part(name, scratch, facts, has_weights=False, download=source.missing())


def fetch(part: Part) -> Part:
    """The same with its weights, downloaded and checked again if need be."""
    if part.has_weights or part.facts is None or part.facts.source is None:
        return part
    try:
        source = part.facts.source.fetch()
    except DFlashError as error:
        again = "run the same command again, which goes on where this one stopped"
        raise DFlashError(error.what, again) from None
    assert source.folder is not None
    return Part(part.name, source.folder, _check(source, part.name))


def _check(source: Source, name: str) -> TargetFacts | DrafterFacts:
    check = check_drafter if is_drafter(source.read_json(CONFIG)) else check_target
    facts = check(source, name)
    facts.raise_first()
    return facts


def _of_folder(folder: Path) -> Source:
    source = Source.of(folder)
    if is_pair_folder(folder):
        raise DFlashError(f"{folder} holds a pair", "give its target or drafter folder as SRC")
    if CONFIG not in source.files:
        file = next(folder.glob("*.gguf"), None)
        step = _GIVE if file is None else f"give the GGUF file {file}"
        raise DFlashError(f"{folder} has no config.json", step)
    return source


def _on_hub(name: str) -> Source:
    """A repository, or its copy here where that is whole and the newest that can be had."""
    try:
        if name.endswith(".gguf"):
            raise ValueError(name)
        validate_repo_id(name)
    except ValueError:
        raise DFlashError(f"there is no file or folder {name[:300]!r}", _GIVE) from None
    try:
        source = Source(name)
        kind = DRAFTER if is_drafter(source.read_json(CONFIG)) else MODEL  # tells what is wanted
        source = replace(source, option=kind)
        return source if source.missing() else source.fetch()
    except DFlashError:
        if (copy := whole_copy(name, DRAFTER)) is None:
            raise
        return copy


def _write_heads(facts: TargetFacts | DrafterFacts, source: Source, folder: Path) -> None:
    """What a model can be built from as if it were whole: configs, and a hole for its weights."""
    for file in _CONFIGS:
        if file in source.files:
            shutil.copyfile(source.path(file), folder / file)
    tensors = facts.weights.tensors
    places = {name: (tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in tensors.items()}
    with open(folder / "model.safetensors", "wb") as output:
        output.write(head(places))
        output.truncate(output.tell() + facts.weights.stored_bytes)


def _check_gguf(path: Path) -> None:
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        return
    if path.suffix in _PICKLES:
        raise DFlashError(f"{path} is pickled, which can run any program", "give safetensors files")
    if path.suffix == ".safetensors":
        raise DFlashError(f"{path} is one file of a model", f"give its folder {path.parent}")
    raise DFlashError(f"{path} is no GGUF file, it begins with {magic!r}", _GIVE)
