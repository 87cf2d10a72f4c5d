"""What training starts from: an existing drafter, the target's last layers, or noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.networks.tensors import parameters_of
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.features import hidden_width, vocabulary_size
from dflash_mlx.train.trainee import Trainee
from dflash_mlx.verifier.model import Target

LAYERS, TAPS, BLOCK_SIZE = 3, 5, 8  # of a new drafter, unless asked for others


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
        raise DFlashError(
            "the tokenizer has no special token to spare for the mask",
            "start from a drafter that names one, with --init",
        )
    return int(unused[-1])


def spread_aux_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers from the second to the third last, evenly, as published drafters have them."""
    first, last = _readable(num_layers)
    if count == 1 or last <= first:
        return (max(first, last),)
    return tuple(sorted({round(x) for x in np.linspace(first, last, count).tolist()}))


def _readable(num_layers: int) -> tuple[int, int]:
    """The first and the last layer that drafters read."""
    return min(1, num_layers - 1), max(num_layers - 3, 0)


def check_taps(target: Target, config: TrainConfig) -> None:
    """Raise DFlashError for more taps asked for than the target has layers to read."""
    first, last = _readable(target.num_layers)
    readable = max(last - first + 1, 1)
    if config.taps is not None and readable < config.taps:
        what = f"taps is {config.taps}, but {target.name} has only {readable} layers to read"
        raise DFlashError(what, f"choose 1 to {readable}", "taps")


def new_config(target: Target, config: TrainConfig, mask_token_id: int) -> dict[str, Any]:
    """A config.json in z-lab's format, with the widths of the target's own layers.

    Raises DFlashError for a target that does not say what they are, and for more layers or taps
    than it has.
    """
    layers = config.layers or LAYERS
    shape = like_target(target, layers)
    check_taps(target, config)
    return {
        **shape,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size or BLOCK_SIZE,
        "dflash_config": {
            "mask_token_id": mask_token_id,
            "target_layer_ids": list(spread_aux_layers(target.num_layers, config.taps or TAPS)),
        },
        "layer_types": ["full_attention"] * layers,
        "num_target_layers": target.num_layers,
    }


def like_target(target: Target, layers: int) -> dict[str, Any]:
    """The fields of a config.json that give a draft network the widths of its target's layers.

    Raises DFlashError for a target that does not say what they are, or has fewer layers.
    """
    if layers > target.num_layers:
        what = f"layers is {layers}, but {target.name} itself has only {target.num_layers}"
        raise DFlashError(what, f"choose 1 to {target.num_layers}", "layers")
    args = getattr(target.model, "args", None)
    names = ("num_attention_heads", "intermediate_size", "rms_norm_eps")
    if args is None or any(getattr(args, name, None) is None for name in names):
        raise DFlashError(
            f"{target.name} does not say how wide its layers are",
            "start from a drafter that fits it, with --init",
        )
    width, heads = hidden_width(target), args.num_attention_heads
    return {
        "attention_bias": False,
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


def warm_start(trainee: Trainee) -> None:
    """Take over the target's last layers and final norm, and pass its last tap through `fc`.

    Raises as `take_layers` does.
    """
    network, last = trainee.network, trainee.target.num_layers
    take_layers(trainee, range(last - len(network.layers), last))
    d = network.fc.weight.shape[0]
    last_tap = mx.concatenate([network.fc.weight[:, :-d], mx.eye(d)], axis=1)
    network.load_weights([("fc.weight", last_tap)], strict=False)
    mx.eval(network.parameters())


def take_layers(trainee: Trainee, chosen: Sequence[int]) -> None:
    """Take over these layers of the target, and its final norm.

    Norms of queries and keys, which most targets lack, stay at one. Raises DFlashError for a
    target whose layers are built otherwise.
    """
    network, target = trainee.network, trainee.target
    norm = getattr(getattr(target.model, "model", None), "norm", None)
    given = {} if norm is None else {"norm.weight": norm.weight}
    for i, place in enumerate(chosen):
        layer = dense(target.model.layers[place])
        given |= {f"layers.{i}.{name}": array for name, array in layer.items()}
    taken = [
        (name, given[name].astype(mx.float32))
        for name, own in parameters_of(network).items()
        if name in given and given[name].shape == own.shape
    ]
    if not any(name.endswith("down_proj.weight") for name, _ in taken):
        raise DFlashError(
            f"the layers of {target.name} are not built like a drafter's",
            "use --start random",
        )
    network.load_weights(taken, strict=False)
    mx.eval(network.parameters())


def dense(layer: nn.Module) -> dict[str, mx.array]:
    """Arrays by name; a quantised matrix is given by the numbers it stands for."""
    arrays: dict[str, Any] = dict(tree_flatten(layer.parameters()))
    for name, module in layer.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            packed = (module.weight, module.scales, module.get("biases"))
            kind = (module.group_size, module.bits, module.mode)
            arrays[f"{name}.weight"] = mx.dequantize(*packed, *kind)
    return arrays
