"""What a family of draft models offers to those who check and load its folders.

A family is a module with these functions, named by the methods that run it (`Method.files`). Which
one reads a folder is told by its config.json, see `methods.format_of`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.findings import Finding
from dflash_mlx.drafters.networks.tensors import DrafterFolder
from dflash_mlx.engine.pair import DraftModel
from dflash_mlx.system.safetensors_header import TensorHeader
from dflash_mlx.verifier.model import Target

CHOOSE_ANOTHER = "choose the drafter of this model with --drafter, or --method none"


class FileFormat(Protocol):
    """The file side of a family. Its configurations and networks are of classes of its own."""

    def recognises(self, raw: Mapping[str, Any], /) -> bool:
        """Whether a config.json is of this family, readable or not."""

    def parse_config(self, raw: Any, source: str, names: Collection[str] = (), /) -> Any:
        """The configuration in a config.json; DFlashError. names: of the tensors beside it.

        It has block_size, the anchor included; vocab_size, its target's; aux_layers, target layers
        (0-based) that are read, None for `usual_taps`;
        quantization, None or with `bits`; notes, what reading had to assume.
        """

    def check_tensors(
        self, tensors: Mapping[str, TensorHeader], config: Any, source: str, /
    ) -> Iterator[Finding]:
        """What the heads of the weight files have and the configuration does not ask for."""

    def misfits(
        self, config: Any, target: Mapping[str, Any], name: str, drafter: str, /
    ) -> Iterator[Finding]:
        """What keeps the drafter from a target with this config.json, each with both values."""

    def read_drafter(self, folder: Path, has_values: bool = True, /) -> DrafterFolder:
        """A folder of any format, checked, its tensors under our names and still lazy.

        has_values: whether there is anything behind the heads of its weight files. Raises
        DFlashError, before any weight is read, for a config.json that `parse_config` refuses, for
        damaged files and for missing, unexpected or misshapen tensors.
        """

    def load(
        self, folder: Path, config: Any, target: Target, settings: PairConfig, /
    ) -> DraftModel:
        """The draft model with its weights, bound to its target; raises as `read_drafter` does.

        settings: whether its weights are quantised, and how far back it sees.
        """


def size_misfits(
    made_for: Mapping[str, int | None], target: Mapping[str, Any], name: str, drafter: str
) -> Iterator[Finding]:
    """Sizes of a target that a drafter was not made for, each with both values.

    made_for: by the fields of the target's config.json, None where a drafter does not say.
    """
    for field, number in made_for.items():
        if number is not None and (has := target.get(field)) != number:
            words = field.replace("num_hidden_layers", "number of target layers")
            what = f"{called(drafter)} was made for a target with {words} {number}, but {name} has "
            yield Finding("error", what + str(has)[:80], CHOOSE_ANOTHER)


def called(drafter: str) -> str:
    """A drafter in a sentence, by its name where it has one."""
    return f"the drafter {drafter}".rstrip()


def usual_taps(layers: int) -> tuple[int, int, int]:
    """What is read of a target with so many layers where a file names none: low, middle, high.

    EAGLE-3 (arXiv 2503.01840) takes the states before layers 2, n // 2 and n - 3. Below seven
    layers these are not three, see `increase`.
    """
    return 1, layers // 2 - 1, layers - 4


def increase(aux_layers: Sequence[int]) -> bool:
    """Whether no layer is read twice or out of order."""
    return all(low < high for low, high in pairwise(aux_layers))


def aux_layers_of(config: Any, layers: int) -> tuple[int, ...]:
    """The layers that a drafter with this configuration reads of such a target."""
    return usual_taps(layers) if config.aux_layers is None else config.aux_layers
