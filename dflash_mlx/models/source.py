"""Where a model is: a folder on this machine, or a Hugging Face repository of which none is kept.

Either way a source lists its files and reads configurations and the heads of weight files, which
say what is in these, and `fetch` makes a folder of it. The patterns say which files are ever
downloaded: none that can run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
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

from dflash_mlx.core.errors import Collector, DFlashError, Finding, in_one_line
from dflash_mlx.core.text import parse_json
from dflash_mlx.models.bars import naming, telling
from dflash_mlx.system.safetensors_header import TensorHeader, judge, read_header

BESIDE = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")  # what is not weights
LICENCES = ("LICENSE*", "NOTICE*")  # kept with what they are of, but no need of loading
CARD = "README.md"  # says what a model was made from
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
MODEL, DRAFTER, SECOND_DRAFTER = "model", "drafter", "second-drafter"  # options that name models
HUB_ERRORS = (OSError, HTTPError, ValueError)

_MAX_JSON = 64 * 2**20  # bytes; tokenizers have 10 to 35 MiB
_SECONDS = 20  # until a hub that is silent is given up
COMPLETE = "choose a complete model folder in Hugging Face format"

HEADROOM = 1.15  # caches and temporary arrays, as a share of the weights

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
BY_LAYER = "intermediate_size"  # gemma3n has a list of them, one for each layer
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
# Sizes of something that is stored, so that the files have at least one bit for each unit.
_STORED = re.compile(
    r"(?!.*(window|chunk|block|group|batch))(.*_(size|dim|dims|layers|heads|rank|experts)|n_\w+|d_\w+|dim)"
)
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Headers = dict[str, TensorHeader]


@dataclass
class Source:
    """A model's files before any weight is read."""

    name: str  # a repository's id, or the folder's path
    folder: Path | None = None  # None where the files are on the hub
    option: str = ""  # the command-line option that names such a model, "" where none does
    part: tuple[str, ...] = ()  # its weight files, where not all of them are wanted
    whole_model: bool = False  # read by mlx-lm, whatever it is given as

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
            raise DFlashError(what, COMPLETE) from None

    @property
    def weights(self) -> str:
        """What its weight files are called; mlx-lm reads no others of a target."""
        as_target = self.whole_model or self.option == MODEL
        return "model*.safetensors" if as_target else "*.safetensors"

    def is_weights(self, file: str) -> bool:
        return file in self.part if self.part else fnmatch(file, self.weights)

    @property
    def _wanted(self) -> list[str]:
        return [*BESIDE, *(self.part or (self.weights,))]

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

    def read_json(self, file: str, next_step: str = COMPLETE) -> dict[str, Any]:
        """A JSON object; DFlashError for a file that is missing, too large or anything else."""
        if file not in self.files:
            raise DFlashError(f"{self.name} has no {file}", next_step)
        try:
            if (size := self.files[file]) > _MAX_JSON:
                raise ValueError(f"it has {size} bytes, at most {_MAX_JSON} are read")
            found: Any = parse_json(self.path(file).read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError(f"it is a JSON {type(found).__name__}, not an object")
        except (OSError, ValueError) as error:
            what = f"{self.place(file)} cannot be read ({in_one_line(error)})"
            raise DFlashError(what, next_step) from None
        return found

    def header(self, file: str, next_step: str) -> dict[str, TensorHeader]:
        """The tensors of a .safetensors file, from its head alone; DFlashError where damaged."""
        if self.folder is not None:
            return read_header(self.folder / file, next_step)
        damaged = (SafetensorsParsingError, AttributeError, TypeError, ValueError, RecursionError)
        try:
            with self._asking():
                head = HfApi().parse_safetensors_file_metadata(self.name, file, timeout=_SECONDS)
            return judge(head.tensors, self.files.get(file, 0))
        except damaged as error:
            what = f"{self.place(file)} is damaged ({in_one_line(error)})"
            raise DFlashError(what, next_step) from None

    def cached(self) -> Source | None:
        """What the Hugging Face cache has of the repository; None where files are known to lack."""
        try:  # where the hub's listing was kept, this compares with it
            found = self._snapshot(self._wanted, local_files_only=True)
            return Source.of(Path(found), self.option)
        except HUB_ERRORS:
            return None

    def fetch(self) -> Source:
        """This model as a folder, downloaded or up to date; DFlashError where that fails."""
        if self.folder is not None:
            return self
        with self._asking():
            found = self._snapshot([*LICENCES, CARD, *self._wanted], tqdm_class=naming(self.name))
        return replace(self, name=str(found), folder=Path(found))

    def missing(self) -> int:
        return sum(self.to_come().values())

    def to_come(self) -> dict[str, int]:
        """Files that `fetch` would download and their bytes, the small ones first."""
        if self.folder is not None:
            return {}
        wanted = [*LICENCES, CARD, *self._wanted]
        with self._asking():
            files = self._snapshot(wanted, dry_run=True, tqdm_class=telling(lambda count: None))
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
        said = (str(error).splitlines() or [type(error).__name__])[0]
        reason = in_one_line(re.sub(r".*\bGot: (.*?)\)?$", r"\1", said))
        reason = "HF_HUB_OFFLINE is set" if "'HF_HUB_OFFLINE=0'" in said else reason
        step = how_to_name(self.option)
        if isinstance(error, GatedRepoError):  # which the next one includes
            what = f"{self.name} is open only to those who have accepted its licence"
            step = f"accept its licence on Hugging Face and log in with hf auth login, or {step}"
        elif isinstance(error, RepositoryNotFoundError):
            what = f"{self.name!r} is neither a folder nor a public model"
        elif isinstance(error, HfHubHTTPError) and not isinstance(error, LocalEntryNotFoundError):
            what = f"Hugging Face refuses {self.name} ({reason})"
            step = f"check the name and your access, or {step}"
        else:
            what = f"{self.name} was not found here, and Hugging Face cannot be reached ({reason})"
            step = f"check the network connection and the name, or {step}"
        return DFlashError(what, step)


def published(author: str, text: str) -> list[str]:
    """Ids of an author's repositories with `text` in their names; [] where the hub says nothing."""
    try:  # the first request fails at once where the second would try again for 20 seconds
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
        return [found.id for found in HfApi().list_models(author=author, search=text, limit=100)]
    except HUB_ERRORS:
        return []


def how_to_name(option: str) -> str:
    """What to do about a name that is of no model."""
    where = f" with --{option}" if option else ""
    return f"give a local folder or a Hugging Face id like owner/name{where}"


# What weight files hold, as their heads tell


@dataclass(frozen=True)
class Weights:
    """All tensors of a model by name; where a name is in two files, one of the two."""

    tensors: Mapping[str, TensorHeader]
    quantisation: str = ""  # in words, "" for none
    group_size: int = 64  # weights that share a scale, where they are quantised

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def parameters(self) -> int:
        """Weights, quantised ones counted one by one, without their scales and biases."""
        return sum(self._weights(name) for name in self.tensors)

    @property
    def dtype(self) -> str:
        """The floating type with the most bytes, or the stored one where none is; or ""."""
        bytes_of: Counter[str] = Counter()
        for tensor in self.tensors.values():
            bytes_of[tensor.dtype] += tensor.nbytes
        floating = [dtype for dtype, _ in bytes_of.most_common() if dtype in FLOATS]
        return FLOATS[floating[0]] if floating else next(iter(bytes_of), "")

    def memory(self, on_cpu: bool) -> int:
        """Bytes to hold them loaded, with room for caches. on_cpu: as float32, its fast path."""
        return int((4 * self.parameters if on_cpu else self.stored_bytes) * HEADROOM)

    def _weights(self, name: str) -> int:
        module, _, part = name.rpartition(".")
        packed, scales = (self.tensors.get(f"{module}.{p}") for p in ("weight", "scales"))
        if packed is None or scales is None or packed.dtype != "U32":
            return self.tensors[name].size
        return scales.size * self.group_size if part == "weight" else 0


def check_weights(
    source: Source,
    raw: Mapping[str, Any],
    found: Collector,
    next_step: str,
    other: str | None = None,  # to choose in place of one that can run code
) -> Weights:
    """The tensors in a model's weight files; what does not fit them, or `raw`, goes to `found`."""
    there = found.attempt(lambda: source.files)
    if there is None:
        return Weights({})
    files = [name for name in there if source.is_weights(name)]
    if not files and not source.part:
        found.add([_no_weights(source, next_step, other)])
        return Weights({})
    headers = {f: found.attempt(source.header, f, next_step) or {} for f in files}
    wrong = (Finding("error", what, next_step) for what in _misplaced(source, headers))
    found.attempt(found.add, wrong)
    tensors = {name: tensor for held in headers.values() for name, tensor in held.items()}
    weights = Weights(tensors, *quantisation(raw))
    found.add(too_large(source, raw, weights))
    return weights


def quantisation(raw: Mapping[str, Any]) -> tuple[str, int]:
    """How weights are quantised, in words, "" for not at all; and the size of a group."""
    found = raw.get("quantization") or raw.get("quantization_config")
    if not isinstance(found, dict):
        return "", 64
    bits, group = found.get("bits"), found.get("group_size")
    if type(bits) is not int or type(group) is not int:
        return str(found.get("quant_method", found.get("mode", "in a way of its own")))[:40], 64
    mode = "" if found.get("mode", "affine") == "affine" else f", {str(found['mode'])[:20]}"
    return f"{bits} bits in groups of {group}{mode}", group


def too_large(source: Source, raw: Mapping[str, Any], weights: Weights) -> Iterator[Finding]:
    """Sizes that the weight files cannot hold, so that building the model would not end well."""
    bits, tensors = 8 * weights.stored_bytes, len(weights.tensors)
    for field, value in _stored_sizes(raw) if tensors else ():
        limit, unit = (tensors, "tensors") if field in _LAYERS else (bits, "bits")
        if value > limit:
            wanted = f"possible with {limit} {unit} of weights"
            yield wrong_number(source, field, value, wanted)


def _stored_sizes(raw: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for field, value in raw.items():
        if isinstance(value, dict):
            yield from _stored_sizes(value)
        elif field == BY_LAYER and isinstance(value, list):
            yield from ((field, v) for v in value if isinstance(v, int | float))
        elif isinstance(value, int | float) and _STORED.fullmatch(field):
            yield field, value


def wrong_number(source: Source, field: str, value: Any, wanted: str) -> Finding:
    """That a field of a config.json is not what was wanted."""
    what = f"{field} in {source.place(CONFIG)} is {repr(value)[:80]}, not {wanted}"
    return Finding("error", what, "choose another model")


def is_whole(source: Source) -> bool:
    """Whether config.json is there, and of the weight files all shards and all of the index."""
    try:
        source.read_json(CONFIG)
        files = {name: Headers() for name in source.files if source.is_weights(name)}
        return bool(files) and not any(_misplaced(source, files))
    except DFlashError:
        return False


def _no_weights(source: Source, next_step: str, other: str | None) -> Finding:
    pickled = [name for name in source.files if any(fnmatch(name, p) for p in PICKLED)]
    if pickled:
        what = f"{source.name} has no .safetensors files, and files like {pickled[0]} can run code"
        step = "choose a folder or a revision with .safetensors files"
        if other is not None:
            step = f"choose {other}, which is for the same model and has .safetensors files"
        return Finding("error", what, step)
    others = [name for name in source.files if name.endswith(".safetensors")]
    instead = f", only {others[0]}" if others else ""
    what = f"No safetensors found in {source.name}: there is no {source.weights}{instead}"
    return Finding("error", what, next_step)


def _misplaced(source: Source, headers: Mapping[str, Headers]) -> Iterator[str]:
    """Files that names or the index ask for and are not there; tensors in no file or in two."""
    where: dict[str, str] = {}
    for file, tensors in headers.items():
        if (match := _SHARD.fullmatch(file)) and not source.part:
            stem, _, count = match.groups()
            names = (f"{stem}-{i:05}-of-{count}.safetensors" for i in range(1, int(count) + 1))
            if missing := next((name for name in names if name not in source.files), None):
                yield f"{source.name} lacks {missing}, which {file} belongs with"
        if both := where.keys() & tensors.keys():
            yield f"tensor {min(both)} of {source.name} is in {where[min(both)]} and in {file}"
        where.update(dict.fromkeys(tensors, file))
    if INDEX in source.files and fnmatch(INDEX, f"{source.weights}*"):
        yield from _against_index(source, headers)


def _against_index(source: Source, headers: Mapping[str, Headers]) -> Iterator[str]:
    weight_map = source.read_json(INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        yield f"{source.place(INDEX)} has no weight_map"
        return
    for file in dict.fromkeys(map(str, weight_map.values())):
        if file not in source.files and (file in source.part or not source.part):
            yield f"{source.name} lacks {file[:200]}, which {INDEX} belongs with"
    for tensor, file in weight_map.items():
        if (held := headers.get(str(file))) and tensor not in held:
            yield f"{source.place(INDEX)} has tensor {tensor} in {file}, which lacks it"
            return
