"""The processor and the vision tower of a model, and what the tower gave of the last pictures."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.core.errors import DFlashError, in_one_line
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.verifier.reading import loading
from dflash_mlx.vision.pictures import Picture
from dflash_mlx.vision.pieces import Look
from dflash_mlx.vision.positions import Table

_WAITING = 8  # pictures whose pixels are kept until the tower comes to them
KEPT = 512 * 2**20  # bytes of looks; a page in 1,500 tokens of 4,096 numbers takes 12 MB
_OTHERS = ("attention_mask_4d", "cross_attention_states", "pos_hw")  # that no pass here is given
_CHOOSE = "ask it in words alone, or choose a model of another family"


def read_whole(folder: Path) -> Any:
    """The model in a folder, whose weights only this thread can read, when they are used."""
    from mlx_vlm.utils import load_model  # takes seconds

    whole = load_model(folder, lazy=True)
    if on_cpu():
        whole.set_dtype(mx.float32)
    if getattr(whole.config, "model_type", "") == "gemma3":  # published without this width
        whole.config.hidden_size = whole.config.text_config.hidden_size
    return whole


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Says what the libraries of a processor and a tower cannot do with pictures."""
    try:
        yield
    except Exception as error:  # of three libraries, one of which raises plain ones
        what = f"{name} cannot read these pictures ({in_one_line(error)})"
        raise DFlashError(what, _CHOOSE) from None


class Eyes:
    """What mlx-vlm reads pictures with; nothing of it is read before the first one."""

    def __init__(self, whole: Any, name: str, folder: Path | None = None, kept: int = KEPT) -> None:
        self.whole, self.name, self._folder, self._kept = whole, name, folder, kept
        self._looks: OrderedDict[str, Look] = OrderedDict()  # by digests, the oldest first
        self._counts: dict[str, int] = {}  # of their placeholders
        self._processed: dict[str, dict[str, Any]] = {}  # not looked at yet
        self.looked = 0  # passes of the tower

    @cached_property
    def processor(self) -> Any:
        from mlx_vlm.utils import load_processor

        with loading(self.name, _CHOOSE):
            return load_processor(self._folder, add_detokenizer=False, trust_remote_code=False)

    @cached_property
    def _tower(self) -> Any:
        """The model with a tower that the thread of the first picture reads, not the loader's."""
        if self._folder is None:
            return self.whole
        with loading(self.name, _CHOOSE):
            tower = read_whole(self._folder)
        tower.language_model = self.whole.language_model
        return tower

    @cached_property
    def settings(self) -> str:
        """A digest of what the processor does to pixels, which versions of mlx-vlm may change."""
        of_images = getattr(self.processor, "image_processor", None) or self.processor
        known = of_images.to_dict() if hasattr(of_images, "to_dict") else vars(of_images)
        told = json.dumps(known, sort_keys=True, default=lambda value: type(value).__name__)
        told += version("mlx-vlm")
        return hashlib.sha256(told.encode()).hexdigest()

    @property
    def mutual(self) -> bool:
        """Whether the places of a picture see each other: in Gemma 3 and the large ones of 4."""
        config = self.whole.config
        said = getattr(config.text_config, "use_bidirectional_attention", None)
        return config.model_type == "gemma3" or said == "vision"

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(look.nbytes for look in self._looks.values())

    @property
    def _tokens(self) -> list[int]:
        config = self.whole.config
        found = (getattr(config, f"image_token_{name}", None) for name in ("id", "index"))
        return [token for token in found if token is not None]

    def process(self, text: str, pictures: Sequence[Picture]) -> dict[str, Any]:
        """What the model takes of a text with pictures; DFlashError where they do not fit it."""
        from mlx_vlm.utils import prepare_inputs

        images = [picture.pixels() for picture in pictures]
        with _reading(self.name):
            return prepare_inputs(  # type: ignore[no-any-return]
                self.processor, images, prompts=text, image_token_index=next(iter(self._tokens), 0)
            )

    def places(self, inputs: dict[str, Any]) -> list[int]:
        """Of the placeholders among the tokens."""
        tokens = inputs["input_ids"][0].tolist()
        named = next((token for token in self._tokens if token in tokens), None)
        return [place for place, token in enumerate(tokens) if token == named]

    def key(self, picture: Picture) -> str:
        return f"{picture.digest} {self.settings}"

    def count(self, picture: Picture, text: str, salt: str = "") -> int:
        """Its placeholders. text: a prompt of this picture alone. salt: as of `look`."""
        key = salt + self.key(picture)
        if key not in self._counts:
            self._processed[key] = inputs = self.process(text, [picture])
            self._counts[key] = len(self.places(inputs))
            while len(self._processed) > _WAITING:
                self._processed.pop(next(iter(self._processed)))
        return self._counts[key]

    def table(self, inputs: dict[str, Any]) -> Table | None:
        """Positions up to the end of the last picture; None for a model that counts tokens."""
        index = getattr(self.whole.language_model, "get_rope_index", None)
        if index is None:
            return None
        names = ("image_grid_thw", "video_grid_thw", "attention_mask")
        with _reading(self.name):
            found, _ = index(inputs["input_ids"], *map(inputs.get, names))
        end = self.places(inputs)[-1] + 1
        return np.array(mx.broadcast_to(found, (3, 1, found.shape[-1])))[:, 0, :end]

    def look(self, picture: Picture, text: str, salt: str = "") -> Look:
        """What the tower gives of a picture, once as long as that is kept.

        salt: of who shows it, as the time must not tell whether others have shown it before.
        """
        key = salt + self.key(picture)
        if key not in self._looks:
            inputs = self._processed.pop(key, None) or self.process(text, [picture])
            self._looks[key] = self._seen(inputs)
        self._looks.move_to_end(key)
        while len(self._looks) > 1 and self.nbytes > self._kept:
            self._looks.popitem(last=False)
        return self._looks[key]

    def _seen(self, inputs: dict[str, Any]) -> Look:
        self.looked += 1
        places = mx.array(self.places(inputs))
        beside = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
        with _reading(self.name):
            seen = self._tower.get_input_embeddings(
                inputs["input_ids"], mask=inputs.get("attention_mask"), **beside
            )
        others = _OTHERS[self.mutual :]  # of a mask, which is ours
        if any(getattr(seen, name, None) is not None for name in others):
            raise DFlashError(f"{self.name} lets pictures see what is behind them", _CHOOSE)
        deeper = seen.deepstack_visual_embeds
        if deeper is not None and not isinstance(deeper, mx.array):
            deeper = mx.stack(list(deeper)) if len(deeper) else None
        look = Look(seen.inputs_embeds[0][places], deeper)
        mx.eval(*(part for part in look if part is not None))
        return look
