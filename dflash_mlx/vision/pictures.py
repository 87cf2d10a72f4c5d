"""Pictures from users and programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Picture:
    """A picture that was decoded once, so it can be again."""

    data: bytes = field(repr=False)  # the file
    width: int  # pixels, as it is seen
    height: int
    digest: str  # SHA-256 of its size and its RGB pixels

    def pixels(self) -> Image.Image:
        """The first frame, RGB and upright."""
        from PIL import Image

        with Image.open(BytesIO(self.data)) as image:
            return image.convert("RGB")
