"""The folders of language models that draft: any that mlx-lm reads, as targets are."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from dflash_mlx.core.config import AS_STORED, PairConfig
from dflash_mlx.core.errors import DFlashError, Finding
from dflash_mlx.drafters.formats import CHOOSE_ANOTHER, FileFormat, other_kind
from dflash_mlx.drafters.lm.model import LanguageConfig, LanguageModel
from dflash_mlx.drafters.networks.fields import Fields, size_or_none
from dflash_mlx.drafters.networks.files import DOWNLOAD_AGAIN, Quantization, pack_at_load
from dflash_mlx.system.safetensors_header import TensorHeader
from dflash_mlx.verifier.mixers import UNTRIED
from dflash_mlx.verifier.model import ONE_OFFSET, Target
from dflash_mlx.verifier.reading import (
    context_length,
    family_of,
    language_model,
    loading,
    read_model,
)
from kernels_metal.dispatch import Mode

_ANY = "language model"  # stands for the classes of all of them
_EMBEDDING = re.compile(r"embed|wte")
_OF_A_HEAD = "fc.weight"  # in heads that read their target, EAGLE 1 and 2
_COUNTED = ("gpt2", "gpt_bigcode")  # have a table with a row for every position, and no more


class LanguageFiles(FileFormat):
    """Whole models, which are recognised as no draft models are."""

    model, known, classes, whole_models = LanguageModel, (_ANY,), (), True

    def reads_target(self, raw: Mapping[str, Any]) -> bool:
        return not other_kind(raw) and bool(family_of(raw))

    def translate(self, raw: Fields, names: Collection[str]) -> Fields:
        return {**language_model(raw), "model_type": family_of(raw), "architectures": [_ANY]}

    def read_fields(self, told: Fields, names: Collection[str]) -> Any:
        kind, notes = told["model_type"], tuple[str, ...]()
        if kind in (*ONE_OFFSET, *UNTRIED):
            notes = (f"rows of a {kind} follow one path, so it drafts chains and no trees",)
        return LanguageConfig(
            model_type=kind,
            vocab_size=size_or_none(told, "vocab_size") or 0,
            context_length=context_length(told),
            quantization=_packed(told),
            notes=notes,
        )

    def check_tensors(
        self, tensors: Mapping[str, TensorHeader], config: Any, source: str
    ) -> Iterator[Finding]:
        if _OF_A_HEAD in tensors:
            what = f"{source} has a tensor {_OF_A_HEAD}, so it is the head of a target, as of "
            yield Finding("error", f"{what}EAGLE 1, and no language model", CHOOSE_ANOTHER)
        elif not any(map(_EMBEDDING.search, tensors)):
            what = f"the .safetensors files in {source} hold no embedding of a language model"
            yield Finding("error", what, DOWNLOAD_AGAIN)

    def misfits(
        self, config: Any, target: Mapping[str, Any], name: str, drafter: str = ""
    ) -> Iterator[Finding]:
        own, theirs = config.context_length, context_length(target)
        what = f"the drafter {drafter} takes {own} tokens, but {name} {theirs or 'may take more'}"
        if config.model_type in _COUNTED and not 0 < theirs <= own:
            yield Finding("error", what, CHOOSE_ANOTHER)
        elif 0 < own < theirs:
            step = "expect fewer accepted drafts after that; answers stay the same"
            yield Finding("note", what, step)

    def check_settings(self, config: Any, settings: PairConfig, name: str) -> None:
        why = {
            "draft_window": "sees as far back as it was trained to",
            "draft_vocabulary": "drafts all tokens of its own head",
        }
        for setting, does in why.items():
            if (value := getattr(settings, setting)) is not None:
                what = f"{setting} is {value}, but {name} is a language model, which {does}"
                raise DFlashError(what, "leave it out", setting)

    def load(
        self, folder: Path, config: Any, target: Target, settings: PairConfig
    ) -> LanguageModel:
        def pack(model: Any) -> None:
            if config.quantization is None:
                pack_at_load(model, settings.drafter_bits or AS_STORED)

        with loading(str(folder), CHOOSE_ANOTHER):
            model, _ = read_model(folder, pack)
        own = Target(model, config.context_length, str(folder))
        own.kv_bits = target.kv_bits
        own.use_kernels(cast(Mode, settings.kernels))
        return LanguageModel(own, config, target)


def _packed(told: Fields) -> Quantization | None:
    found = told.get("quantization") or told.get("quantization_config")
    packed = [found.get(n) for n in ("group_size", "bits")] if isinstance(found, dict) else []
    group, bits = packed or (None, None)
    return Quantization(group, bits) if type(group) is int and type(bits) is int else None


FILES = LanguageFiles()
