"""From names to a pair: a target with its tokenizer, and a drafter that fits it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError, of its HTTP client
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
)

from dflash_mlx.config import DecodeConfig, PairConfig
from dflash_mlx.drafters.checkpoint import check_block_size, check_fit, load_network, read_config
from dflash_mlx.drafters.network import Network, NetworkConfig
from dflash_mlx.errors import DFlashError
from dflash_mlx.target import Target
from kernels_metal.dispatch import Mode

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_DRAFTER = "smollm2-135m-dflash"
DEFAULT_SECOND_DRAFTER = "smollm2-135m-variable-prefix"
DRAFTED = ("dflash", "ddtree", "d2sd", "resample")  # methods that need a drafter network

CheckConfig = Callable[[dict[str, Any]], None]
Loaded = tuple[Any, Any, int]  # model, tokenizer, context length

_DATA = Path(__file__).parent / "data"
_LOAD_ERRORS = (
    ValueError, KeyError, TypeError, OSError, RuntimeError, AttributeError, ImportError
)  # fmt: skip
_CONTEXT_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]


@dataclass(frozen=True)
class Pair:
    """A target with its tokenizer, and the drafter networks that fit it, if any.

    tokenizer: mlx-lm's TokenizerWrapper. second_network: D2SD's variable-prefix drafter.
    experience: what sessions have learned about drafting, by method and settings.
    """

    target: Target
    tokenizer: Any
    network: Network | None = None
    network_config: NetworkConfig | None = None
    drafter_name: str | None = None
    second_network: Network | None = None
    second_config: NetworkConfig | None = None
    experience: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


def load(model: str | None = None, drafter: str | None = None) -> Pair:
    """Load a target and its drafter.

    model, drafter: a Hugging Face id or a local folder. Without `model`, the embedded default
    target, with its own drafter unless another is named. Without `drafter`, any other model is
    loaded alone and can decode plainly. Raises DFlashError for what cannot be found or read, and
    for a drafter that does not fit.
    """
    return load_pair(PairConfig(model, drafter))


def load_pair(config: PairConfig, *uses: DecodeConfig) -> Pair:
    """`load` from settings; whether all fits is checked before weights are fetched or read.

    uses: settings that the pair will be used with; DFlashError where it cannot serve them.
    """
    name = DEFAULT_MODEL if config.model is None else config.model
    folders = [f for f in (_drafter_folder(config), _second_folder(config, uses)) if f is not None]
    network_configs = [read_config(folder) for folder in folders]
    for use in uses:
        if use.method in DRAFTED:
            first = require_drafter(next(iter(network_configs), None), name)
            check_block_size(use.block_size, first)
        if use.method == "d2sd":
            check_block_size(use.block_size, network_configs[-1])

    def check(target_config: dict[str, Any]) -> None:
        for network_config in network_configs:
            check_fit(network_config, target_config, name)

    target, tokenizer = _load_target(config.model, check)
    target.use_kernels(cast(Mode, config.kernels))
    pair = Pair(target, tokenizer)
    loaded = [
        (load_network(folder, network_config, target.dtype), network_config)
        for folder, network_config in zip(folders, network_configs, strict=True)
    ]
    if loaded:
        pair = replace(pair, network=loaded[0][0], network_config=loaded[0][1])
        pair = replace(pair, drafter_name=config.drafter or DEFAULT_DRAFTER)
    if len(loaded) > 1:
        pair = replace(pair, second_network=loaded[1][0], second_config=loaded[1][1])
    return pair


def load_target(name: str | None = None) -> Pair:
    """A target alone, the default one without a name; raises as `load` does.

    Its kernels are off: they have no gradients, and batch work has more rows than they take.
    """
    return Pair(*_load_target(name, lambda target_config: None))


def _load_target(name: str | None, check: CheckConfig) -> tuple[Target, Any]:
    loader = _load_default if name is None else partial(_load_model, name)
    model, tokenizer, context_length = loader(check)
    return Target(model, context_length, name or DEFAULT_MODEL), tokenizer


def require_drafter(config: NetworkConfig | None, target_name: str) -> NetworkConfig:
    """The drafter's configuration, or DFlashError where there is no drafter."""
    if config is None:
        raise DFlashError(
            f"no drafter is known for {target_name}",
            "name one with --drafter, or use --method none",
        )
    return config


def resolve_folder(name: str, option: str) -> Path:
    """The local folder `name`, or a Hugging Face repository's snapshot, downloaded if need be.

    option: the command-line option that `name` came from, for the error message.
    """
    next_step = f"give a local folder or a Hugging Face id like owner/name with --{option}"
    try:
        folder = Path(name or "no name").expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError, ValueError):  # no such user's home, too long, a zero byte
        raise DFlashError(f"there is no folder {name[:80]!r}", next_step) from None
    if is_folder:
        return folder
    if exists:
        raise DFlashError(f"{name} is a file, not a model folder", next_step)
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, ignore_patterns=["*/*"]))
    except HFValidationError:
        raise DFlashError(f"there is no folder {name!r}", next_step) from None
    except RepositoryNotFoundError:
        raise DFlashError(f"{name!r} is neither a folder nor a public model", next_step) from None
    except (OSError, HTTPError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DFlashError(
            f"{name!r} is no local folder and could not be downloaded ({reason})",
            "check the name and the network connection, or " + next_step,
        ) from None


def _drafter_folder(config: PairConfig) -> Path | None:
    if config.drafter is not None:
        return resolve_folder(config.drafter, "drafter")
    return _DATA / DEFAULT_DRAFTER if config.model is None else None


def _second_folder(config: PairConfig, uses: Sequence[DecodeConfig]) -> Path | None:
    """The variable-prefix drafter's, where there is one and a method uses it."""
    unused = bool(uses) and all(use.method != "d2sd" for use in uses)
    if config.second_drafter == "none" or unused:
        return None
    if config.second_drafter is not None:
        if _drafter_folder(config) is None:
            raise DFlashError("a second drafter needs a first one", "name one with --drafter")
        return resolve_folder(config.second_drafter, "second-drafter")
    return _DATA / DEFAULT_SECOND_DRAFTER if config.model is None else None


def _load_default(check: CheckConfig) -> Loaded:
    from dflash_mlx.default_model import fetch
    from dflash_mlx.gguf_target import load_gguf

    shipped = read_config(_DATA / DEFAULT_DRAFTER)
    check(
        {
            "hidden_size": shipped.hidden_size,
            "vocab_size": shipped.vocab_size,
            "num_hidden_layers": shipped.num_target_layers,
        }
    )
    model, tokenizer, config = load_gguf(fetch(), dequantize=_on_cpu())
    return model, tokenizer, int(config["max_position_embeddings"])


def _load_model(name: str, check: CheckConfig) -> Loaded:
    """Any model that mlx-lm knows; on a CPU its weights become float32, the fast path there."""
    from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

    folder = resolve_folder(name, "model")
    config = _read_target_config(folder)
    context_length = _context_length(config, folder)
    check(config)
    try:
        model, loaded = load_model(folder)
        tokenizer = load_tokenizer(
            folder, {"trust_remote_code": False}, eos_token_ids=loaded.get("eos_token_id")
        )
    except _LOAD_ERRORS as error:
        raise DFlashError(
            f"{name} cannot be loaded ({error})",
            "choose a complete model folder of a family that mlx-lm supports",
        ) from None
    if _on_cpu():
        model = dequantize_model(model)
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    return model, tokenizer, context_length


def _read_target_config(folder: Path) -> dict[str, Any]:
    """config.json with the language model's part on top."""
    next_step = "choose a complete model folder in Hugging Face format"
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config: dict[str, Any] = {**raw, **raw.get("text_config", {})}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DFlashError(f"{folder} has no readable config.json ({error})", next_step) from None
    if "model_file" in config:
        raise DFlashError(
            f"{folder} asks to run its own Python file {config['model_file']!r}",
            "choose a model of a family that mlx-lm supports itself",
        )
    return config


def _context_length(config: dict[str, Any], folder: Path) -> int:
    for key in _CONTEXT_LENGTHS:
        if isinstance(config.get(key), int) and config[key] > 0:
            return int(config[key])
    raise DFlashError(
        f"{folder}/config.json has no max_position_embeddings",
        f"add {_CONTEXT_LENGTHS[0]} to it, or choose another model",
    )


def _on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))
