"""Tiny random drafters in every published format, and what NumPy says that they draft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dflash_mlx.core.config import PairConfig
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.methods import format_as_drafter
from dflash_mlx.drafters.networks.files import read_json
from dflash_mlx.verifier.model import Target
from support import (
    reference_dflash,
    reference_dflash2,
    reference_domino,
    reference_dspark,
    reference_gemma,
)
from support.families import VOCAB_SIZE
from support.family_configs import sliding
from support.reference_dflash import (
    DRAFT_IDS,
    Array,
    Config,
    LinkedBlock,
    draft_vocabulary,
    over_vocabulary,
    random_drafter,
    write_drafter_folder,
)
from support.reference_dflash import tiny_drafter_config as version_1

TAPS = [0, 2]
NAMES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}
HEADS = {
    "markov_rank": reference_dspark.RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def speculators(kind: str = "dflash", **changes: Any) -> dict[str, Any]:
    """The layout of the library's releases: the network under `transformer_layer_config`."""
    version_2, dspark = kind == "dflash2", kind == "dspark"
    layers = reference_dflash2.tiny_config() if version_2 else version_1()
    method = layers.pop("dflash_config")
    layers = {k: v for k, v in layers.items() if k not in ("block_size", "num_target_layers")}
    layers["rope_parameters"] = {"rope_theta": layers.pop("rope_theta"), "rope_type": "default"}
    del layers["rope_scaling"], layers["architectures"]
    layers.update(changes.pop("transformer_layer_config", {}))
    sizes = {k: v for k, v in method.items() if k.startswith(("conv_", "selector_"))}
    return {
        "architectures": [NAMES[kind]],
        "auto_map": {"": f"config.{kind}SpeculatorConfig"},  # as the library writes it
        "aux_hidden_state_layer_ids": [i + 1 for i in TAPS],
        "block_size": 6,
        "draft_vocab_size": layers["vocab_size"],
        "dtype": "float32",
        "mask_token_id": 5,
        "sample_from_anchor": dspark,
        "sliding_window_non_causal": version_2,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "tiny/llama"}},
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": layers,
        **sizes,
        **(HEADS if dspark else {}),
        **changes,
    }


def as_version_1(config: Config) -> Config:
    """What a speculators config says, written by hand in z-lab's layout, in which others stay."""
    if "transformer_layer_config" not in config:
        return config
    layers = config["transformer_layer_config"]
    sizes = {k: v for k, v in config.items() if k.startswith(("conv_", "selector_"))}
    method = {"mask_token_id": config["mask_token_id"], "target_layer_ids": TAPS, **sizes}
    return {**layers, "block_size": config["block_size"], "dflash_config": method}


def own_tables(draft_ids: Array | None, seed: int = 5) -> dict[str, Array]:
    """An embedding and a head of the drafter's own, the head over a draft vocabulary if given."""
    rng = np.random.default_rng(seed)
    rows = VOCAB_SIZE if draft_ids is None else len(draft_ids)
    tables = {
        "embed_tokens.weight": rng.standard_normal((VOCAB_SIZE, 64)).astype(np.float32),
        "lm_head.weight": (rng.standard_normal((rows, 64)) / 8).astype(np.float32),
    }
    return tables if draft_ids is None else tables | draft_vocabulary(draft_ids)


def write_shards(folder: Path, config: Config, tensors: Mapping[str, Array]) -> Path:
    """As `write_drafter_folder`, in three files and an index."""
    write_drafter_folder(folder, config, {})
    (folder / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for i, part in enumerate((names[:4], names[4:5], names[5:]), start=1):
        file = f"model-{i:05}-of-00003.safetensors"
        save_file({name: np.ascontiguousarray(tensors[name]) for name in part}, folder / file)
        places.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def drafter_folder(
    folder: Path, aux_layers: list[int], seed: int, target: Target, **changes: Any
) -> BlockModel:
    """A draft model of `target`, read from a folder that is written."""
    layers, method = target.num_layers, {"target_layer_ids": aux_layers}
    raw = version_1(num_target_layers=layers, dflash_config=method, **changes)
    return written(folder, raw, random_drafter(raw, seed), target)  # type: ignore[no-any-return]


def written(
    folder: Path, raw: Config, tensors: Mapping[str, Array], target: Target, **settings: Any
) -> Any:
    """The draft model of `target` that a folder with this configuration and these tensors has."""
    return loaded(write_drafter_folder(folder, raw, tensors), target, **settings)


def loaded(folder: Path, target: Target, **settings: Any) -> Any:
    """The draft model of `target` in a folder."""
    files = format_as_drafter(read_json(folder))
    assert files is not None
    return files.load(folder, files.read_drafter(folder).config, target, PairConfig(**settings))


def is_dspark(config: Config) -> bool:
    """Whether the drafter can draft from its anchor's row, and have DSpark's heads."""
    is_one = "DSpark" in config["architectures"][0]
    return is_one or bool(reference_dspark.field(config, "sample_from_anchor", False))


def is_domino(config: Config) -> bool:
    """Whether the drafter has Domino's head."""
    return config.get("dflash_config", {}).get("projector_type") in ("domino", "causal_v5")


def specforge(**changes: Any) -> dict[str, Any]:
    """DSpark in the layout of SpecForge: the method's fields as z-lab has them."""
    raw = reference_dspark.tiny_config(architectures=["DSparkDraftModel"], **changes)
    moved = ("mask_token_id", "target_layer_ids", *HEADS)
    method = {name: raw.pop(name) for name in moved} | {"projector_type": "dspark"}
    return {**raw, "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}, "dflash_config": method}


def lfm2() -> dict[str, Any]:
    """DSpark in LiquidAI's layout: some of them there, and neighbours of the rope turn together."""
    raw = reference_dspark.tiny_config(architectures=["Lfm2DSparkDraftModel"])
    moved = ("mask_token_id", "target_layer_ids", "num_target_layers")
    method = {name: raw.pop(name) for name in moved}
    del raw["confidence_head_with_markov"]
    return {**raw, "rope_is_neox_style": False, "dflash_config": method}


def reference_block(
    config: Config, tensors: Mapping[str, Array], tables: tuple[Array, Array], *block: Any
) -> LinkedBlock:
    """What NumPy says of a block of DFlash 2, DSpark or Domino.

    block: features, anchor, rows, prefix.
    """
    if is_domino(config):
        return reference_domino.Block(config, tensors, tables, *block)
    if is_dspark(config):
        return reference_dspark.Block(config, tensors, tables, *block)
    return reference_dflash2.Block(as_version_1(config), tensors, tables, *block)


def expected_logits(
    config: Config, tensors: Mapping[str, Array], tables: tuple[Array, Array], *block: Any
) -> Array:
    """[n, V] over the target's vocabulary, in NumPy, without what a linking head adds."""
    raw = as_version_1(config)
    if is_dspark(config) or {"conv_kernel_size", "emb_dim"} & {*raw["dflash_config"]}:
        logits = reference_block(config, tensors, tables, *block).logits
    else:
        own = zip(("embed_tokens.weight", "lm_head.weight"), tables, strict=True)
        given = [tensors.get(name, table) for name, table in own]
        logits = reference_dflash.draft_logits(tensors, raw, *given, *block)
    return over_vocabulary(logits, tensors)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
SCALES = {
    "final_logit_softcapping": 3.0,
    "input_embedding_scale": 2.0,
    "output_multiplier": 0.5,
}


def body(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random tensors of the network itself, with DSpark's or Domino's heads."""
    if is_domino(config):
        return reference_domino.random_tensors(config)
    if is_dspark(config):
        size = config.get("draft_vocab_size", VOCAB_SIZE)
        return reference_dspark.random_tensors(config, 0 if size == VOCAB_SIZE else size)
    config = as_version_1(config)
    if "conv_kernel_size" in config["dflash_config"]:
        return reference_dflash2.random_tensors(config)
    return reference_dflash.random_drafter(config)


def case(config: dict[str, Any], **more: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
    return config, {**body(config), **more}


FULL = own_tables(None)
REDUCED = own_tables(DRAFT_IDS)
VERIFIER = {"verifier_norm.weight": np.ones(64, np.float32)}
GEMMA_4 = reference_gemma.CONFIG
NATIVE_35: dict[str, Any] = {  # gated queries, norms of 1 + w, and half of each head turns
    "architectures": ["Qwen35DSparkModel"],
    "enable_qwen35_gated_q_proj": True,
    "model_type": "qwen3_5",
    "rope_parameters": {
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "rope_type": "default",
    },
}
HALF = speculators(draft_vocab_size=len(DRAFT_IDS))

FORMATS = {
    "version 1": case(version_1()),
    "version 1, variable prefix": case(version_1(dflash_config={"training_mode": "vp_drafter"})),
    "version 1, sliding": case(version_1(**SLIDING)),
    "version 2": case(reference_dflash2.tiny_config()),
    "version 2, sliding": case(reference_dflash2.tiny_config(**SLIDING, is_causal=False)),
    "version 2, three taps": case(
        reference_dflash2.tiny_config(dflash_config={"conv_kernel_size": 3, "conv_group_size": 64})
    ),
    "version 2, padded vocabulary": case(
        reference_dflash2.tiny_config(dflash_config={"selector_vocab_size": 60})
    ),
    "version 2, scaled and capped": case(reference_dflash2.tiny_config(dflash_config=SCALES)),
    "speculators": case(speculators()),
    "speculators, own tables": case(speculators(), **FULL),
    "speculators, own embedding": case(
        speculators(), **{"embed_tokens.weight": FULL["embed_tokens.weight"]}, **VERIFIER
    ),
    "speculators, draft vocabulary": case(HALF, **REDUCED),
    "speculators, draft vocabulary, no embedding": case(
        HALF, **{name: REDUCED[name] for name in ("lm_head.weight", "d2t", "t2d")}
    ),
    "speculators, sliding": case(speculators(transformer_layer_config=SLIDING)),
    "speculators, version 2": case(speculators("dflash2")),
    "speculators, from the anchor": case(speculators(sample_from_anchor=True)),
    "dspark": case(reference_dspark.tiny_config(), **FULL),
    "dspark, confidence of states": case(
        reference_dspark.tiny_config(confidence_head_with_markov=False), **FULL
    ),
    "dspark, no confidence": case(
        reference_dspark.tiny_config(enable_confidence_head=False, draft_vocab_size=97), **FULL
    ),
    "dspark, no heads": case(
        reference_dspark.tiny_config(markov_rank=0, enable_confidence_head=False), **FULL
    ),
    "dspark, layers of Qwen3.5": case(reference_dspark.tiny_config(**NATIVE_35), **FULL),
    "dspark, Gemma 4": case(reference_dspark.tiny_config(**GEMMA_4), **FULL),
    "dspark, Gemma 4, values of their own": case(
        reference_dspark.tiny_config(**GEMMA_4 | {"attention_k_eq_v": False}), **FULL
    ),
    "dspark, specforge": case(specforge()),
    "dspark, lfm2": case(lfm2()),
    "dspark, speculators": case(speculators("dspark"), **FULL),
    "dspark, draft vocabulary": case(
        speculators("dspark", draft_vocab_size=len(DRAFT_IDS)), **REDUCED
    ),
    "dspark, from masks": case(
        speculators("dspark", sample_from_anchor=False, transformer_layer_config=SLIDING), **FULL
    ),
}

DOMINO = {  # in the layouts of SpecForge, the published checkpoints and NVIDIA's Automodel
    "domino": case(reference_domino.tiny_config()),
    "domino, published": case(
        reference_domino.tiny_config(
            architectures=["DFlashDraftModel"], dflash_config={"pure_draft_prefix_len": 0}
        )
    ),
    "domino, from masks": case(
        reference_domino.tiny_config(
            architectures=["Qwen3DFlashDraftModel"],
            block_size=6,
            dflash_config={"shift_label": False, "pure_draft_prefix_len": 2},
        )
    ),
}
FORMATS |= DOMINO
HALVES = "speculators, draft vocabulary"
DSPARK = [name for name in FORMATS if name.startswith("dspark") and "no heads" not in name]
SURE = [name for name in DSPARK if "no confidence" not in name]


NEWER_ROPE = version_1(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
del NEWER_ROPE["rope_theta"], NEWER_ROPE["rope_scaling"]

WINDOWS = {  # of the first version, and what else changes what a block sees
    "full and causal": case(version_1(is_causal=True)),
    "both sliding": case(version_1(**sliding("SS", 12))),
    "shorter than the block": case(version_1(**sliding("SS", 3))),
    "over one position": case(version_1(**sliding("SS", 1))),
    "not causal": case(version_1(**sliding("SS", 12), is_causal=False)),
    "shorter than the block, not causal": case(version_1(**sliding("SS", 3), is_causal=False)),
    "mixed": case(version_1(**sliding("SFS", 6))),
    "mixed and causal": case(version_1(**sliding("FSF", 6), is_causal=True)),
    "newer rope": case(NEWER_ROPE),
    "scaled and capped": case(version_1(dflash_config=SCALES)),
    "block size inside": case(version_1(dflash_config={"block_size": 6})),
}
