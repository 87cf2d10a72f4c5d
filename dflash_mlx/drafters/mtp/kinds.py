"""What differs between the heads of different targets, one class a family of targets.

A kind says how mlx-lm makes the decoder layer, which variant of the network the targets were
trained with, and by which names a published checkpoint has its tensors. A new one is a subclass
with the `model_types` of its targets, in a file that `checkpoint` imports.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.networks.fields import OTHER_DRAFTER, Fields, named, whole
from dflash_mlx.drafters.networks.files import Arrays
from dflash_mlx.verifier.cache import LayerCache


class Kind:
    """A target whose heads nobody publishes: one of its layers, as training makes them."""

    model_types: ClassVar[tuple[str, ...]] = ()  # of mlx-lm's modules
    count: ClassVar[str] = ""  # the field that says how many heads a published checkpoint has
    dedicated: ClassVar[str] = ""  # the field that says whether it brings an embedding
    # How the network differs from `model.HeadConfig`'s usual, by the names of fields there
    variant: ClassVar[Mapping[str, Any]] = {}
    one_layer: ClassVar[Mapping[str, Any]] = {}  # fields that make a head's of a target's fields
    eps: ClassVar[tuple[str, ...]] = ("rms_norm_eps", "norm_eps", "norm_epsilon")  # of its norms
    array_masks: ClassVar[bool] = False  # whether they take no mask that is the word "causal"

    def arguments(self, text: Fields) -> Fields:
        """What mlx-lm makes a model of a head's layers and no others of."""
        few: Fields = {"num_hidden_layers": 1, "vocab_size": 1, "tie_word_embeddings": True}
        if isinstance(text.get("layer_types"), list):
            few["layer_types"] = ["full_attention"]
        return {**text, **few, **self.one_layer, "model_type": model_type(text)}

    def make_layers(self, text: Fields) -> list[nn.Module]:
        """The decoder layers of a head, mlx-lm's own, their weights not yet there.

        text: a target's configuration. Raises what mlx-lm raises for one that it cannot build, and
        DFlashError for layers that no draft can be taken back from.
        """
        from dflash_mlx.verifier.sequence import new_sequence

        model = self.make_model(text)
        if new_sequence(model, "the head", None, None).is_recurrent:
            what = f"a head of {model_type(text)} would have recurrent layers"
            raise DFlashError(what, OTHER_DRAFTER)
        return list(model.layers)

    def make_model(self, text: Fields) -> Any:
        """mlx-lm's model of these layers; raises what mlx-lm raises."""
        from mlx_lm.utils import _get_classes  # takes seconds

        arguments = self.arguments(text)
        model_class, args_class = _get_classes(arguments)
        return model_class(args_class.from_dict(arguments))

    def keeps(self, layer: Any) -> bool:
        """Whether a layer has keys and values of its own; the first one has, and no other."""
        return True

    def remember(self, layer: Any, x: mx.array, cache: LayerCache) -> None:
        """Write keys and values of rows x [1, n, d] into `cache`, which has begun the pass."""
        mask = self.mask(x.shape[1], cache)
        if "input_layernorm" in layer and "self_attn" in layer:
            layer.self_attn(layer.input_layernorm(x), mask, cache)
        else:
            layer(x, mask, cache)

    def mask(self, rows: int, cache: LayerCache) -> mx.array | str | None:
        return cache.make_mask(rows, return_array=self.array_masks and rows > 1)

    # In published checkpoints

    def heads(self, text: Fields) -> int:
        """How many a configuration says that there are."""
        return whole(text, self.count, default=0, least=0) if self.count else 0

    def refusal(self, text: Fields) -> str:
        """Why heads that a configuration tells of are not read, "" where they are."""
        count = self.heads(text)
        return f"{self.count} is {count}, supported is 1" if count > 1 else ""

    def our_name(self, name: str, text: Fields) -> str | None:
        """Ours for a tensor of the head in its target's files; None for one of the target."""
        return None

    def arranged(self, tensors: Arrays, text: Fields) -> Arrays:
        """The network's tensors, lazily, of those that files have; names are already ours."""
        return tensors

    def finished(self, tensors: Arrays, text: Fields) -> Arrays:
        """What was arranged, as its numbers tell that it is meant; ValueError if they do not."""
        return tensors

    def in_files(self, names: Collection[str], text: Fields) -> dict[str, str]:
        """Our names of a head's tensors in its target's files, by theirs."""
        ours = ((name, self.our_name(name, text)) for name in names)
        return {name: own for name, own in ours if own is not None}


def model_type(text: Fields) -> str:
    """The module of mlx-lm for a target's configuration, or a part of it for text."""
    name = text.get("model_type")
    if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
        raise ValueError(f"model_type is {name!r}")
    return name.removesuffix("_text")


def text_of(raw: Mapping[str, Any]) -> Fields:
    """A target's configuration with its part for text on top, where it has one."""
    part = raw.get("text_config")
    if not isinstance(part, dict):
        return dict(raw)
    outer = named(dict(raw), ("model_type", "tie_word_embeddings"))
    return {**outer, **part}


def kind_of(text: Fields) -> Kind:
    """The kind of a target with this configuration; ValueError for a model_type that is none."""
    own = model_type(text)
    known = (kind for kind in _subclasses(Kind) if own in kind.model_types)
    return next(known, Kind)()


def _subclasses(kind: type[Kind]) -> list[type[Kind]]:
    direct = kind.__subclasses__()
    return [*direct, *(deeper for each in direct for deeper in _subclasses(each))]
