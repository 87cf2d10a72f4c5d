"""The files of draft models: what every family does alike, and what each says of its own.

A family is a subclass of `FileFormat`, named by the methods that run it (`Method.files`). Which one
reads a folder is told by its config.json, see `methods.format_of`. All is checked before any weight
is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import AS_STORED, PairConfig
from dflash_mlx.core.errors import DFlashError, Finding, in_one_line
from dflash_mlx.drafters.networks.fields import Fields, Unsupported, architecture, note_of
from dflash_mlx.drafters.networks.files import (
    DOWNLOAD_AGAIN,
    FLAGS,
    FLOATING,
    Arrays,
    DraftConfig,
    check_vocabulary,
    in_words,
    pack_at_load,
    parameters_of,
    quantize_network,
    read_headers,
    read_json,
    stored_config,
)
from dflash_mlx.drafters.networks.layers import limit_windows
from dflash_mlx.engine.pair import DraftModel
from dflash_mlx.system import cpu_math
from dflash_mlx.system.safetensors_header import TensorHeader
from dflash_mlx.verifier.model import Target

CHOOSE_ANOTHER = "choose the drafter of this model with --drafter, or --method none"
SPECULATORS = "speculators_model_type"
# Draft models that no family reads, by class or model_type
_OTHER_KINDS = re.compile(
    r"medusa|assistant|speculator|draft|eagle(?:model)?$|_mtp|mtp(?:model)?$",
    re.IGNORECASE,
)


def other_kind(raw: Mapping[str, Any]) -> str:
    """The class or model_type of a draft model that no family reads, "" for others."""
    kinds = (str(kind)[:80] for kind in (architecture(raw), raw.get("model_type")))
    return next((kind for kind in kinds if _OTHER_KINDS.search(kind)), "")


class FileFormat:
    """How the folders of one family are recognised, checked and loaded.

    raw: a config.json. names: of the tensors in its files, () where these are not known. source:
    where it is from, for messages.
    """

    config: ClassVar[type[DraftConfig]]
    network: ClassVar[type[Any]]  # made of a configuration
    model: ClassVar[type[Any]]  # a `DraftModel`, made of a network, its configuration and a target
    known: ClassVar[tuple[str, ...]]  # `architectures` of a config.json in our words
    model_types: ClassVar[Collection[str]] = ()  # by which its files are known as well
    speculators: ClassVar[tuple[str, ...]] = ()  # types of vLLM's library
    # What its classes are called, each a pattern with a field that has to be there, "" for none
    classes: ClassVar[tuple[tuple[str, str], ...]]
    marks: ClassVar[tuple[str, ...]] = ()  # fields by which it refuses what no family recognises
    # Whether its folders are language models with a tokenizer, which has to be the target's
    whole_models: ClassVar[bool] = False

    @property
    def family(self) -> str:
        """Of the draft models in such folders."""
        return str(self.model.family)

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        """Whether a config.json is of this family, readable or not."""
        if (kind := raw.get(SPECULATORS)) is not None:
            return kind in self.speculators
        name = architecture(raw)
        return raw.get("model_type") in self.model_types or any(
            re.fullmatch(pattern, name) and (not field or field in raw)
            for pattern, field in self.classes
        )

    def reads_target(self, raw: Mapping[str, Any]) -> bool:
        """Whether it drafts with a target's folder too, given as --drafter: the model or a part."""
        return False

    def lacking(self, raw: Mapping[str, Any]) -> str:
        """What a target's folder could have for this family, and where to get it; "" for nothing.

        In words behind its name.
        """
        return ""

    def own_tensors(self, raw: Fields, names: Collection[str]) -> Collection[str]:
        """Those of the tensors in a folder that are read; all, unless it is a target's."""
        return names

    def own_sizes(self, raw: Fields) -> Fields:
        """A config.json with the sizes of what is read of its folder, by which these are judged."""
        return raw

    def review(self, raw: Fields, names: Collection[str]) -> Iterable[str]:
        """Fields that are left out, which a note says; Unsupported for one that must not be."""
        return ()

    def translate(self, raw: Fields, names: Collection[str]) -> Fields:
        """A config.json in our words; one that is in them already stays as it is.

        Raises ValueError for what is not supported, KeyError for a missing field.
        """
        return raw

    def read_fields(self, told: Fields, names: Collection[str]) -> DraftConfig:
        """The configuration in a config.json in our words; raises as readers of fields do."""
        return self.config.read(told)

    def our_names(self, names: Collection[str]) -> dict[str, str]:
        """The network's names of tensors, by those in files."""
        return {name: name for name in names}

    def optional(self, config: Any) -> dict[str, str]:
        """Tensors in words that may be there and are not needed."""
        return {}

    def settle(self, network: Any, config: Any) -> Any:
        """The network as it is used, evaluated; on a CPU without packed matrices, slow there."""
        if config.quantization is not None and cpu_math.applies():
            from mlx_lm.utils import dequantize_model  # takes seconds

            network = dequantize_model(network)
        mx.eval(network.parameters())
        return network

    # What all families do alike

    def parse_config(self, raw: Any, source: str, names: Collection[str] = ()) -> Any:
        """The configuration in a config.json; DFlashError for what is of no usable drafter."""
        try:
            if not isinstance(raw, dict):
                raise ValueError(f"the contents are {raw!r}, and what they describe is unknown")
            notes = note_of(self.review(raw, names))
            told = self.translate(raw, names)
            if (name := architecture(told)) not in self.known:
                known = ", ".join(self.known)
                raise ValueError(f"architectures is {name!r}, supported are {known}")
            config = self.read_fields(told, names)
        except KeyError as error:
            raise DFlashError(f"config.json of {source} lacks {error}", DOWNLOAD_AGAIN) from None
        except (ValueError, TypeError, OverflowError) as error:
            step = error.next_step if isinstance(error, Unsupported) else DOWNLOAD_AGAIN
            raise DFlashError(f"in {source}/config.json, {in_one_line(error)}", step) from None
        for problem, wrong in config.problems().items():
            if wrong:
                raise DFlashError(f"in {source}, {problem}", DOWNLOAD_AGAIN)
        return replace(config, notes=tuple(dict.fromkeys((*config.notes, *notes))))

    def misfits(
        self, config: DraftConfig, target: Mapping[str, Any], name: str, drafter: str = ""
    ) -> Iterator[Finding]:
        """What keeps a drafter from a target, each with both values.

        target: `hidden_size`, `vocab_size` and `num_hidden_layers` as in the target's config.json.
        name, drafter: what to call the two.
        """
        who = f"the drafter {drafter}".rstrip()
        made_for = {
            "hidden_size": config.target_width,
            "vocab_size": config.vocab_size,
            "num_hidden_layers": config.num_target_layers,
        }
        for field, number in made_for.items():
            if number is not None and (has := target.get(field)) != number:
                words = field.replace("num_hidden_layers", "number of target layers")
                what = f"{who} was made for a target with {words} {number}, but {name} has "
                yield Finding("error", what + str(has)[:80], CHOOSE_ANOTHER)
        layers = target.get("num_hidden_layers")
        if type(layers) is int and (problem := config.unreadable(layers)):
            what = f"{who} reads layers {list(config.layers_read(layers))} (counted from 0), "
            what += f"but {name} has {layers} layers, {problem}"
            yield Finding("error", what, CHOOSE_ANOTHER)

    def check_settings(self, config: Any, settings: PairConfig, name: str) -> None:
        """Raise DFlashError for settings that this draft model, called `name`, cannot follow."""

    def build(self, config: DraftConfig, source: str) -> Any:
        """The network that a configuration describes, its weights not yet there.

        Raises DFlashError for a rope that mlx-lm does not know, for sizes
        that MLX cannot have and for a quantisation that does not fit.
        """
        try:
            network = self.network(config)
        except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError) as error:
            lacks = isinstance(error, KeyError)
            reason = f"its rope lacks {error}" if lacks else in_one_line(error)
            what = f"mlx-lm and MLX cannot make the network that {source} describes ({reason})"
            raise DFlashError(what, DOWNLOAD_AGAIN) from None
        if (packed := config.quantization) is not None:
            quantize_network(network, packed.bits, packed.group_size)
        return network

    def check_tensors(
        self, tensors: Mapping[str, TensorHeader], config: DraftConfig, source: str
    ) -> Iterator[Finding]:
        """Tensors that are missing, unexpected or of another shape or kind than is asked for.

        tensors: by their names in the files. Raises as `build`.
        """
        needed = parameters_of(self.build(config, source))
        if not tensors:
            what = f"the .safetensors files in {source} hold no tensors"
            yield Finding("error", what, DOWNLOAD_AGAIN)
            return
        ours, optional = self.our_names(tensors), self.optional(config)
        found = {ours[name]: in_words(t.dtype, t.shape) for name, t in tensors.items()}
        if config.draft_vocab_size is not None:
            optional["t2d"] = in_words(FLAGS, (config.vocab_size,))  # which ids d2t leads to
        yield from differences(needed, found, source, optional)

    def checked_arrays(self, folder: Path, config: DraftConfig) -> Arrays:
        """All arrays of a folder by their names in files, lazy, if they are what is asked for."""
        for finding in self.check_tensors(read_headers(folder), config, str(folder)):
            raise DFlashError(finding.what, finding.next_step)
        tensors: Arrays = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= mx.load(str(file))  # type: ignore[arg-type]
        return tensors

    def read_tensors(self, folder: Path, config: DraftConfig) -> Arrays:
        """The tensors that the network needs, by its names, lazy.

        Raises DFlashError, before any weight is read, for damaged files, for missing, unexpected or
        misshapen tensors; and for a draft vocabulary that contradicts itself.
        """
        tensors = self.checked_arrays(folder, config)
        tensors = {ours: tensors[name] for name, ours in self.our_names(tensors).items()}
        if config.draft_vocab_size is not None:
            tensors["d2t"] = tensors["d2t"].astype(mx.int64)
            offsets, marked = np.array(tensors["d2t"]), tensors.get("t2d")
            check_vocabulary(folder, config.vocab_size, offsets, marked)
        return {name: tensors[name] for name in parameters_of(self.build(config, str(folder)))}

    def read_drafter(self, folder: Path) -> DrafterFolder:
        """A folder of any format; raises as `parse_config` and `read_tensors` do."""
        raw, names = read_json(folder), read_headers(folder)
        config = self.parse_config(raw, str(folder), names)
        return DrafterFolder(self, config, self.read_tensors(folder, config), self.told(raw, names))

    def told(self, raw: Fields, names: Collection[str]) -> Fields:
        """A config.json in our words, without what asks to run code of its own."""
        return {name: v for name, v in self.translate(raw, names).items() if name != "auto_map"}

    def load_network(
        self, folder: Path, config: DraftConfig, dtype: mx.Dtype, bits: int | None = AS_STORED
    ) -> Any:
        """The network with the weights in `folder`, cast to `dtype`.

        bits: see `pack_at_load`. Raises as `read_tensors` does.
        """
        network = self.build(config, str(folder))
        network.load_weights([*self.read_tensors(folder, config).items()])
        network.set_dtype(dtype)
        if config.quantization is None:
            pack_at_load(network, bits)
        return self.settle(network, config)

    def load(
        self, folder: Path, config: DraftConfig, target: Target, settings: PairConfig
    ) -> DraftModel:
        """The draft model with its weights, bound to its target; raises as `load_network` does.

        settings: whether its weights are quantised, and how far back it sees.
        """
        windows = limit_windows(config.layer_windows, settings.draft_window)
        usual = AS_STORED if settings.adapted else None  # packing again could round a delta away
        bits = settings.drafter_bits or usual
        network = self.load_network(folder, config, target.dtype, bits)
        return self.model(network, replace(config, layer_windows=windows), target)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class DrafterFolder:
    """A drafter folder of any format, as it would be in ours."""

    files: FileFormat
    config: Any
    tensors: Arrays  # by our names, lazy
    raw: Fields  # its config.json in our words, without what asks to run code of its own

    def network(self) -> Any:
        """The network with these tensors; nothing is evaluated, nothing cast."""
        network = self.files.build(self.config, "config.json")
        return network.load_weights([*self.tensors.items()])

    def converted(
        self, dtype: mx.Dtype | None, bits: int | None, group_size: int | None
    ) -> tuple[Arrays, Fields]:
        """Lazy weights and config.json in our format, cast and packed where that is not None."""
        network = self.network()
        if dtype is not None:
            network.set_dtype(dtype)
        if bits is not None:
            quantize_network(network, bits, group_size)
        return parameters_of(network), stored_config(network, self.raw)


def differences(
    needed: Arrays, found: Mapping[str, str], source: str, optional: Mapping[str, str] = {}
) -> Iterator[Finding]:
    """Tensors of `source` that are missing, unexpected or of another shape or kind than needed.

    found, optional: those in its files, and those that may be there; in words, by our names.
    """
    wanted = {name: in_words(array.dtype, array.shape) for name, array in needed.items()}
    for name in sorted(wanted.keys() | found.keys()):
        has = found.get(name, "missing")
        needs = {**optional, **wanted}.get(name, "no such tensor")
        if has != needs and not (name in optional and has == "missing"):
            what = f"tensor {name} in {source} is {has}, but its config.json asks for {needs}"
            yield Finding("error", what, DOWNLOAD_AGAIN)


def layers_of_speculators(raw: Fields) -> Fields:
    """The fields of the network in a config.json of vLLM's speculators, as Llama or Qwen3 has them.

    Raises ValueError for a type that no family reads.
    """
    known = [kind for family in FileFormat.__subclasses__() for kind in family.speculators]
    if (kind := raw[SPECULATORS]) not in known:
        raise ValueError(f"{SPECULATORS} is {kind!r}, not supported; {', '.join(known)} are")
    if not isinstance(layers := raw["transformer_layer_config"], dict):
        raise ValueError(f"transformer_layer_config is {layers!r}")
    return layers


def proposed_tokens(raw: Fields) -> int | None:
    """How many tokens a file of speculators proposes at a time, None where it does not say."""
    try:
        tokens = raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (LookupError, TypeError):
        return None
    return tokens if type(tokens) is int else None


def left_by_training(width: int, drafted: int) -> dict[str, str]:
    """Tensors in words that the training of speculators leaves and nobody needs."""
    return {
        "verifier_norm.weight": in_words(FLOATING, (width,)),
        "verifier_lm_head.weight": in_words(FLOATING, (drafted, width)),
    }
