"""The files of heads: in a target's own folder, split off by mlx-vlm, and ours.

Ours have the target's configuration as `text_config`, beside it what `HeadConfig` reads, and the
tensors by the names of split folders. In a target's folder only the tensors of the head count, all
others are passed over. How matrices are packed the tensors tell, one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mode
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.core.config import BITS
from dflash_mlx.core.errors import DFlashError, Finding, in_one_line
from dflash_mlx.drafters.formats import CHOOSE_ANOTHER, FileFormat, differences
from dflash_mlx.drafters.mtp import published
from dflash_mlx.drafters.mtp.kinds import kind_of, model_type, text_of
from dflash_mlx.drafters.mtp.model import INSIDE, OURS, SPLIT, HeadConfig, HeadModel, Network
from dflash_mlx.drafters.networks.fields import (
    LIBRARY,
    Fields,
    Part,
    Refused,
    Unsupported,
    architecture,
    flag,
    number,
    size,
)
from dflash_mlx.drafters.networks.files import (
    DOWNLOAD_AGAIN,
    GROUP_SIZES,
    Arrays,
    Quantization,
    in_words,
    parameters_of,
)
from dflash_mlx.system.safetensors_header import TensorHeader
from dflash_mlx.verifier.reading import loading

CLASS = "MTPDraftModel"
SPLIT_TYPES = ("qwen3_5_mtp", "glm4_moe_lite_mtp")  # model_type of mlx-vlm's folders
TAKE_OUT = (
    "take it out of the model as its authors published it, with python -m dflash_mlx.convert "
    "OWNER/NAME DST --mtp, and give DST with --drafter"
)
DEFAULT_BLOCK = 8  # rows; a head may go on for as long as that pays
_DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32, "U8": mx.uint8,
    "I32": mx.int32, "I64": mx.int64, "F8_E4M3": mx.uint8,
}  # fmt: skip
_PACKING = ("quantization", "quantization_config")  # of the target; the head's its tensors tell
_IN_SPLIT = Part(
    read={"text_config", "tie_word_embeddings", *_PACKING},
    silent={*LIBRARY, "block_size"},  # how long that program's drafts are unless it is told
)
_IN_OURS = Part(
    read={
        "text_config", "block_size", "hidden_normed", "hidden_first", "feeds_normed",
        "own_embedding", "own_head", "notes", *_PACKING,
    },
    silent=LIBRARY,
)  # fmt: skip
_IN_TARGET = Part(  # what a target's configuration says of its head, by names that begin so
    read={
        "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mtp_hybrid_override_pattern",
        "mtp_layers_block_type",
    },
    silent={"mtp_loss_scaling_factor", "mtp_loss_weight", "mtp_use_repeated_layer"},
    refused={
        "mtp_layer_types": Refused("only full attention is", (None, ["full_attention"])),
        "mtp_use_hidden_state_from_layer": Refused("but only the last layer's states are read"),
    },
)  # fmt: skip
__all__ = ["CLASS", "FILES", "MTPFiles", "our_config", "published"]


def our_config(text: Fields, **changes: Any) -> Fields:
    """The config.json of a head in our format, for a target with this configuration."""
    usual = {"architectures": [CLASS], "text_config": text, "block_size": DEFAULT_BLOCK}
    return {**usual, **kind_of(text).variant, **changes}


class MTPFiles(FileFormat):
    """Heads for multi-token prediction."""

    config, network, model = HeadConfig, Network, HeadModel
    known = (CLASS,)
    classes, model_types = ((CLASS, ""),), SPLIT_TYPES

    def reads_target(self, raw: Mapping[str, Any]) -> bool:
        try:
            text = text_of(raw)
            return kind_of(text).heads(text) > 0
        except ValueError:
            return False

    def lacking(self, raw: Mapping[str, Any]) -> str:
        has_one = self.reads_target(raw) and not self.recognises(raw)
        if not has_one or kind_of(text := text_of(raw)).refusal(text):
            return ""
        return (
            "was made with a head for multi-token prediction, which its files lack: python -m "
            "dflash_mlx.convert OWNER/NAME DST --mtp takes it out of the published model"
        )

    def own_tensors(self, raw: Fields, names: Collection[str]) -> Collection[str]:
        if self.recognises(raw):
            return names
        text = text_of(raw)
        return kind_of(text).in_files(names, text)

    def own_sizes(self, raw: Fields) -> Fields:
        text = text_of(raw)
        return {k: v for k, v in text.items() if k not in ("num_hidden_layers", *_PACKING)}

    def review(self, raw: Fields, names: Collection[str]) -> Iterator[str]:
        said = {name: v for name, v in text_of(raw).items() if name.startswith("mtp_")}
        yield from _IN_TARGET.review(said, names=names)
        if architecture(raw) == CLASS:
            yield from _IN_OURS.review(raw, names=names)
        elif raw.get("model_type") in SPLIT_TYPES:
            yield from _IN_SPLIT.review(raw, names=names)

    def translate(self, raw: Fields, names: Collection[str]) -> Fields:
        if architecture(raw) == CLASS:
            return raw
        text = {k: v for k, v in text_of(raw).items() if k not in (*_PACKING, "auto_map")}
        kind = kind_of(text)
        if not kind.count:
            raise ValueError(f"model_type is {text.get('model_type')!r}, whose heads are not known")
        if not kind.heads(text):
            raise ValueError(f"{kind.count} is {text.get(kind.count)!r}")
        if why := kind.refusal(text):
            raise Unsupported(why)
        inside = kind.in_files(names, text)
        split = raw.get("model_type") in SPLIT_TYPES and not inside
        ours = names if split else inside.values()
        own = {
            "own_embedding": "embed_tokens.weight" in ours or flag(text, kind.dedicated),
            "own_head": "lm_head.weight" in ours,
        }
        return our_config(text, **own, layout=SPLIT if split else INSIDE)

    def told(self, raw: Fields, names: Collection[str]) -> Fields:
        return {name: v for name, v in super().told(raw, names).items() if name != "layout"}

    def read_fields(self, told: Fields, names: Collection[str]) -> HeadConfig:
        if not isinstance(text := told.get("text_config"), dict):
            raise ValueError(f"text_config is {text!r}")
        kind = kind_of(text)
        eps = next((name for name in kind.eps if text.get(name) is not None), kind.eps[0])
        config = HeadConfig.read(
            {**text, **told},
            text=text,
            intermediate_size=1,  # mlx-lm's layer reads what its kind has of these
            rope={},
            rms_norm_eps=number(text, eps, above=0),
            attention_bias=False,
            layer_windows=(None,),
            block_size=size(told, "block_size"),
            num_target_layers=size(text, "num_hidden_layers"),
            quantization=None,
        )
        packed = self._packed(names, config)
        usual = mode(packed.values()) if packed else None
        return replace(config, packed=packed, quantization=usual)

    def _packed(self, names: Collection[str], config: HeadConfig) -> dict[str, Quantization]:
        """How each matrix is packed, by the shapes of its tensors; ValueError if not MLX's way."""
        if not isinstance(names, Mapping) or not any(name.endswith(".scales") for name in names):
            return {}
        tensors = self._as_ours({n: _blank(t) for n, t in names.items()}, config)
        whole, found = parameters_of(self.build(config, "config.json")), {}
        for name, scales in tensors.items():
            place, _, part = name.rpartition(".")
            if part == "scales" and f"{place}.weight" in whole:
                width = whole[f"{place}.weight"].shape[-1]
                packed = tensors.get(f"{place}.weight", scales)
                found[place] = _packing(place, width, packed, scales, f"{place}.biases" in tensors)
        return found

    def _as_ours(self, tensors: Arrays, config: HeadConfig) -> Arrays:
        """The head's tensors of those in files, lazily."""
        if config.layout == INSIDE:
            names = config.kind.in_files(tensors, config.text)
            tensors = {own: tensors[name] for name, own in names.items()}
        return tensors if config.layout == OURS else config.kind.arranged(tensors, config.text)

    def misfits(
        self, config: Any, target: Mapping[str, Any], name: str, drafter: str = ""
    ) -> Iterator[Finding]:
        yield from super().misfits(config, target, name, drafter)
        made_for, has = model_type(config.text), str(target.get("model_type", ""))
        if has and made_for != has.removesuffix("_text"):
            what = f"the drafter {drafter}".rstrip()
            what += f" was made for a target with model_type {made_for}, but {name} has {has[:80]}"
            yield Finding("error", what, CHOOSE_ANOTHER)

    def build(self, config: Any, source: str) -> Network:
        with loading(f"the layer that {source} describes", DOWNLOAD_AGAIN):
            network = Network(config)
        if config.packed:
            packed = {path: asdict(how) for path, how in config.packed.items()}
            nn.quantize(network, class_predicate=lambda path, _: packed.get(path, False))
        return network

    def check_tensors(
        self, tensors: Mapping[str, TensorHeader], config: Any, source: str
    ) -> Iterator[Finding]:
        needed = parameters_of(self.build(config, source))
        try:
            ours = self._as_ours({n: _blank(t) for n, t in tensors.items()}, config)
        except ValueError as error:
            yield Finding("error", f"in {source}, {in_one_line(error)}", DOWNLOAD_AGAIN)
            return
        if not ours:
            what = f"the files of {source} hold no head for multi-token prediction, though "
            what += f"{config.kind.count} is {config.kind.heads(config.text)}"
            yield Finding("error", what, TAKE_OUT)
            return
        if any(name.endswith("_scale_inv") for name in ours):
            what = f"the head of {source} is stored in blocks of FP8, which are not read"
            yield Finding("error", what, "take it out of the model's checkpoint in bfloat16")
            return
        found = {name: in_words(array.dtype, array.shape) for name, array in ours.items()}
        yield from differences(needed, found, source)

    def read_tensors(self, folder: Path, config: Any) -> Arrays:
        try:
            ours = self._as_ours(self.checked_arrays(folder, config), config)
            return ours if config.layout == OURS else config.kind.finished(ours, config.text)
        except ValueError as error:
            what = f"the head in {folder} cannot be read, {in_one_line(error)}"
            raise DFlashError(what, DOWNLOAD_AGAIN) from None


FILES = MTPFiles()


def _blank(tensor: TensorHeader) -> mx.array:
    """An array like one that a file has; it is never evaluated."""
    return mx.zeros(tensor.shape, _DTYPES.get(tensor.dtype, mx.complex64))


def _packing(
    place: str, width: int, packed: mx.array, scales: mx.array, biased: bool
) -> Quantization:
    """Of a matrix with rows of `width` numbers, by the shapes of its parts."""
    groups, words = scales.shape[-1], packed.shape[-1]
    group, bits = width // max(groups, 1), 32 * words // width
    exact = group * groups == width and bits * width == 32 * words
    if not biased or not exact or group not in GROUP_SIZES or bits not in (2, 3, *BITS, 5, 6):
        raise ValueError(f"{place} is packed in a way that is not MLX's affine one")
    return Quantization(group, bits)
