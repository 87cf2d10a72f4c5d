"""The settings of a conversion."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dflash_mlx.core.config import option
from dflash_mlx.core.errors import DFlashError

MODES = ("affine", "mxfp4", "nvfp4", "mxfp8")
RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
DTYPES = ("float16", "bfloat16", "float32")
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (16, 32, 64, 128)
DRAFTER_BITS = (4, 8)


@dataclass(frozen=True)
class ConvertConfig:
    """What becomes of the weights; without any setting they keep their numbers."""

    bits: int | None = option(
        None, "quantise the matrices to so many bits, a drafter's to 4 or 8", type=int, choices=BITS
    )
    group_size: int | None = option(
        None,
        "weights that share a scale, in target and drafter (default: the mode's own)",
        type=int,
        choices=GROUP_SIZES,
    )
    mode: str = option("affine", "how a target is quantised", choices=MODES)
    recipe: str | None = option(
        None, "quantise a target with more bits where they matter", choices=RECIPES
    )
    dtype: str | None = option(
        None, "of what is not quantised (default: as the checkpoint says)", choices=DTYPES
    )
    dequantize: bool = option(
        False, "undo a target's quantisation, before another one if asked for", action="store_true"
    )
    drafter_bits: int | None = option(
        None, "with --pair: quantise the drafters so", type=int, choices=DRAFTER_BITS
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            value, choices = getattr(self, field.name), field.metadata["argparse"].get("choices")
            if choices is not None and value not in (field.default, *choices):
                shown = ", ".join(map(str, choices))
                raise DFlashError(f"{field.name} is {value!r}", f"choose one of {shown}")
        if self.recipe is not None and (self.mode != "affine" or self.bits is not None):
            raise DFlashError(
                f"the recipe {self.recipe} sets bits and mode itself", "leave --bits and --mode out"
            )
        if self.group_size is not None and not self.quantizes and self.drafter_bits is None:
            raise DFlashError(
                f"group_size is {self.group_size}, but nothing is quantised", "add --bits"
            )

    @property
    def quantizes(self) -> bool:
        """Whether the target, or a drafter that is converted alone, is quantised."""
        return self.bits is not None or self.recipe is not None or self.mode != "affine"
