"""A drafter in training, of any family, over many blocks at once, and what it starts as."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import mlx.core as mx
import numpy as np
from mlx_lm.utils import dequantize_model

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import require
from dflash_mlx.drafters.networks.files import parameters_of, save_network
from dflash_mlx.drafters.networks.model import capped
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train.blocks import Array, Blocks
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.data import Texts, hidden_width, vocabulary_size
from dflash_mlx.verifier.model import Target

LAYERS, TAPS, BLOCK_SIZE = 3, 5, 8  # of a new drafter, unless asked for others
_NOISE = 0.02  # standard deviation of fresh weights
_UNTRAINABLE = {  # by what a config has then
    "own_embedding": "an embedding of its own",
    "own_head": "a head of its own",
    "quantization": "quantised weights",
    "sample_from_anchor": "drafts from its anchor's row",
    "markov_rank": "DSpark's heads",
    "gru_hidden_dim": "Domino's head",
    "mask_hidden": "drafts of one pass, as P-EAGLE's are",
    "logits_shifted": "shifted logits",
    "offset_norms": "norms of 1 + w",
    "gemma_layers": "Gemma's layers",
}
START_FROM = "choose one in full precision that drafts with the target's embedding and head"
_Trainee = TypeVar("_Trainee", bound="Trainee")


@dataclass(frozen=True)
class Trainee(ABC):
    """A network in float32 that drafts with its target's embedding and head."""

    network: Any
    config: Any
    raw: dict[str, Any]  # its config.json
    target: Target
    files: ClassVar[Any]  # reads and writes its family, see `FileFormat`

    @classmethod
    @abstractmethod
    def new(cls: type[_Trainee], config: TrainConfig, pair: Pair) -> _Trainee:
        """A drafter that a run starts from, where no other is named."""

    @classmethod
    def of(
        cls: type[_Trainee], raw: dict[str, Any], target: Target, names: Collection[str] = ()
    ) -> _Trainee:
        """What a config.json describes, with weights that mean nothing yet.

        names: of the tensors that it was read with, () for a new one.
        """
        config = cls.files.parse_config(raw, "the drafter", names)
        return cls(cls.files.build(config, "the drafter"), config, raw, target)

    @classmethod
    def fresh(cls: type[_Trainee], raw: dict[str, Any], target: Target, seed: int) -> _Trainee:
        """What a config.json describes, with norms at one and small noise everywhere else."""
        new, noise, weights = cls.of(raw, target), mx.random.key(seed), []
        for name, array in parameters_of(new.network).items():
            noise, key = mx.random.split(noise)
            weight = mx.random.normal(array.shape, key=key) * _NOISE
            weights.append((name, mx.ones(array.shape) if array.ndim == 1 else weight))
        new.network.load_weights(weights)
        mx.eval(new.network.parameters())
        return new

    @classmethod
    def read(cls: type[_Trainee], folder: Path, target: Target) -> _Trainee:
        """An existing drafter; DFlashError for one that does not fit, or cannot be trained here."""
        drafter = cls.files.read_drafter(folder)
        sizes = {"hidden_size": hidden_width(target), "vocab_size": vocabulary_size(target)}
        facts = {**sizes, "num_hidden_layers": target.num_layers}
        for misfit in cls.files.misfits(drafter.config, facts, target.name, str(folder)):
            raise DFlashError(misfit.what, misfit.next_step)
        if has := [w for name, w in _UNTRAINABLE.items() if getattr(drafter.config, name, None)]:
            raise DFlashError(f"{folder} holds a drafter with {' and '.join(has)}", START_FROM)
        network = drafter.network()
        network.set_dtype(mx.float32)
        mx.eval(network.parameters())
        return cls(network, drafter.config, drafter.raw, target)

    def prepared(self: _Trainee, mode: str, block_size: int | None = None) -> _Trainee:
        """This drafter, to be trained in a mode, and in blocks of this size if one is given."""
        if block_size is None:
            return self
        config = replace(self.config, block_size=block_size)
        return replace(self, config=config, raw={**self.raw, "block_size": block_size})

    def save(self, folder: Path) -> None:
        """Write a drafter folder; OSError where the disk is full."""
        save_network(folder, self.network, self.raw)

    @abstractmethod
    def inputs(self, texts: Texts, blocks: Blocks) -> tuple[mx.array, ...]:
        """What `states` takes for these blocks."""

    @abstractmethod
    def states(self, *inputs: mx.array) -> mx.array:
        """Final states [S, A, B, d]: [..., i, :] tells what is at position i of a block.

        Position 0 holds the anchor, and what is there means nothing.
        """

    def embed(self, tokens: Array) -> mx.array:
        """[..., d] float32, the target's embedding of tokens [...]."""
        rows: mx.array = self.target.embedding()(mx.array(tokens))
        return rows.astype(mx.float32)

    def logits(self, states: mx.array) -> mx.array:
        """[..., V] from final states [..., d]."""
        config = self.config
        logits = self.target.head()(states * config.output_multiplier)
        return capped(logits, config.final_logit_softcapping)

    def drafts(self, states: mx.array, before: Array) -> Array:
        """[S, A, n] greedy tokens from final states [S, A, n, d]; before: those that precede."""
        return np.array(mx.argmax(self.logits(states), axis=-1))

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The layers that it reads of its target."""
        return self.config.layers_read(self.target.num_layers)  # type: ignore[no-any-return]


def mask_token(tokenizer: Any) -> int:
    """The tokenizer's mask token, or a special token that no conversation contains.

    Raises DFlashError for a tokenizer that has neither.
    """
    if (mask := getattr(tokenizer, "mask_token_id", None)) is not None:
        return int(mask)
    in_use = {*tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id}
    if tokenizer.has_chat_template:
        turns = [{"role": role, "content": "."} for role in ("user", "assistant", "user")]
        in_use |= set(tokenizer.apply_chat_template(turns, add_generation_prompt=True))
    unused = sorted(set(tokenizer.all_special_ids) - in_use)
    if not unused:
        what = "the tokenizer has no special token to spare for the mask"
        raise DFlashError(what, "start from a drafter that names one, with --init")
    return int(unused[-1])


def spread_aux_layers(target: Target, asked: int | None, usual: int) -> tuple[int, ...]:
    """So many layers from the second to the third last, evenly, as published drafters have them.

    Raises DFlashError for more asked for than the target has layers to read.
    """
    first, last = min(1, target.num_layers - 1), max(target.num_layers - 3, 0)
    readable, count = max(last - first + 1, 1), asked or usual
    fits = asked is None or asked <= readable
    require(fits, "taps", asked, f"1 to {readable}, as many layers as can be read of the target")
    if count == 1 or last <= first:
        return (max(first, last),)
    return tuple(sorted({round(x) for x in np.linspace(first, last, count).tolist()}))


def like_target(target: Target, layers: int, config: TrainConfig) -> dict[str, Any]:
    """The fields of a config.json that give a draft network the widths of its target's layers.

    Raises DFlashError for a target that does not say what they are, or has fewer layers.
    """
    most = target.num_layers
    require(layers <= most, "layers", layers, f"1 to {most}, as many as {target.name} itself has")
    args = getattr(target.model, "args", None)
    names = ("num_attention_heads", "intermediate_size", "rms_norm_eps")
    if args is None or any(getattr(args, name, None) is None for name in names):
        what = f"{target.name} does not say how wide its layers are"
        raise DFlashError(what, "start from a drafter that fits it, with --init")
    width, heads = hidden_width(target), args.num_attention_heads
    return {
        "attention_bias": False,
        "block_size": config.block_size or BLOCK_SIZE,
        "dtype": "bfloat16",
        "head_dim": getattr(args, "head_dim", None) or width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": args.intermediate_size,
        "max_position_embeddings": target.context_length,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": getattr(args, "num_key_value_heads", None) or heads,
        "rms_norm_eps": args.rms_norm_eps,
        "rope_scaling": getattr(args, "rope_scaling", None),
        "rope_theta": float(getattr(args, "rope_theta", 10000.0)),
        "tie_word_embeddings": False,
        "vocab_size": vocabulary_size(target),
    }


def take_layers(
    trainee: Trainee,
    chosen: Sequence[int],
    called: Callable[[int, str], str] = "layers.{}.{}".format,
) -> None:
    """Take over these layers of the target, and its final norm; pass the last tap through `fc`.

    Norms of queries and keys, which most targets lack, stay at one. A matrix that reads more than
    the target's ends with the target's. called: the name here of a tensor of the i-th of them.
    Raises DFlashError for a target whose layers are built otherwise.
    """
    network, target = trainee.network, trainee.target
    norm = getattr(getattr(target.model, "model", None), "norm", None)
    given = {} if norm is None else {"norm.weight": norm.weight}
    for i, place in enumerate(chosen):
        layer = parameters_of(dequantize_model(deepcopy(target.model.layers[place])))
        given |= {called(i, name): array for name, array in layer.items()}
    if "fc" in network:
        given["fc.weight"] = mx.eye(trainee.config.hidden_size)
    taken = []
    for name, own in parameters_of(network).items():
        theirs = given.get(name)
        if theirs is not None and own.shape[:-1] == theirs.shape[:-1]:
            beside, rest = divmod(own.shape[-1], theirs.shape[-1])
            if beside and not rest:
                kept = own[..., : -theirs.shape[-1]]
                taken.append((name, mx.concatenate([kept, theirs.astype(mx.float32)], axis=-1)))
    if not any(name.endswith("down_proj.weight") for name, _ in taken):
        what = f"the layers of {target.name} are not built like a drafter's"
        raise DFlashError(what, "use --start random")
    network.load_weights(taken, strict=False)
    mx.eval(network.parameters())
