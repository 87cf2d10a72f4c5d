"""Readers of `reference_formats.py` that call packages for MLX."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from reference_case import SCALES, Case, check_path


def target_of(case: Case) -> Any:
    """An embedding and a head."""
    tables = nn.Module()
    tables.embed_tokens, tables.lm_head = nn.Embedding(97, 64), nn.Linear(64, 97, bias=False)
    tables.embed_tokens.weight = mx.array(case.arrays["embedding"])
    tables.lm_head.weight = mx.array(case.arrays["head"])
    return SimpleNamespace(model=tables, lm_head=tables.lm_head, args=SimpleNamespace())


def zlab(case: Case) -> Any:
    from dflash import model_mlx

    if case.library or case.kind not in ("DFlashDraftModel", "DFlash2DraftModel"):
        return None
    if "emb_dim" in case.method or case.field("sample_from_anchor"):
        return None
    model_mlx.snapshot_download = lambda name, **_: name
    model = model_mlx.load_draft(str(case.folder))
    model.set_dtype(mx.float32)
    model.bind(target_of(case))
    given = mx.array([case.block]), mx.array(case.features)[None]
    if case.kind == "DFlash2DraftModel":
        path, _, _ = model.propose(*given, model.make_cache(), 0.0, logits_start=1)
        check_path(case, path[0].tolist())
    return np.array(model(*given, model.make_cache(), logits_start=1)[0])


def mlx_vlm(case: Case) -> Any:
    from mlx_vlm.speculative.drafters.dflash2 import DFlash2DraftModel
    from mlx_vlm.speculative.drafters.dflash2.config import DFlash2Config
    from mlx_vlm.speculative.drafters.dspark import DSparkDraftModel
    from mlx_vlm.speculative.drafters.dspark.config import DSparkConfig
    from mlx_vlm.speculative.drafters.qwen3_dflash import DFlashDraftModel
    from mlx_vlm.speculative.drafters.qwen3_dflash.config import DFlashConfig

    made, config = {
        "DFlashDraftModel": (DFlashDraftModel, DFlashConfig),
        "DFlash2DraftModel": (DFlash2DraftModel, DFlash2Config),
        "DSparkDraftModel": (DSparkDraftModel, DSparkConfig),
        "Lfm2DSparkDraftModel": (DSparkDraftModel, DSparkConfig),
    }.get(case.kind, (None, None))
    is_first = made is DFlashDraftModel
    if made is None or case.library or "emb_dim" in case.method or case.slides:
        return None
    if is_first and (any(case.field(name) for name in SCALES) or case.field("is_causal")):
        return None
    model = made(config.from_dict(case.raw))
    stored = mx.load(str(case.folder / "model.safetensors"))
    model.load_weights([*model.sanitize(stored).items()])
    DFlashDraftModel.bind(model, target_of(case))
    rows, features = mx.array([case.block]), mx.array(case.features)[None]
    hidden = model._hidden(rows, features, model.make_cache())[:, int(case.first) :]
    logits = model._logits(hidden)
    if made is DSparkDraftModel:
        logits = model.markov_head.apply_step_logits(logits, mx.array([case.before]))
    if made is DFlash2DraftModel:
        given = case.anchor, features, model.make_cache(), len(case.block)
        path = model.draft_block(*given, lambda scores: mx.argmax(scores, axis=-1))
        check_path(case, path[0].tolist())
    return np.array(logits[0])


def mlx_vlm_eagle(case: Case) -> Any:
    if case.library != "eagle3" or any(case.field(n) for n in ("fc_norm", "norm_output")):
        return None
    from mlx_vlm.speculative.drafters.eagle3 import Eagle3DraftModel, ModelConfig

    layer = case.raw["transformer_layer_config"]
    if case.slides or layer["model_type"] == "qwen3":
        return None
    model, told = Eagle3DraftModel(ModelConfig.from_dict(case.raw)), []
    stored = mx.load(str(case.folder / "model.safetensors"))
    weights = model.sanitize(stored) if hasattr(model, "sanitize") else stored
    model.load_weights([*weights.items()], strict=False)
    model.reset(target_of(case).model)
    rows = mx.array([[*case.tokens[1:], case.anchor]])
    h = model._forward_tokens(rows, mx.array(case.features)[None], mx.int32)[:, -1:]
    told.append(model._logits(h)[0])
    for token in case.path:
        h = model._forward_tokens(mx.array([[token]]), h, mx.int32)
        told.append(model._logits(h)[0])
    return np.array(mx.concatenate(told))


READERS: dict[str, tuple[Callable[[Case], Any], ...]] = {
    "dflash": (zlab,),
    "mlx-vlm": (mlx_vlm, mlx_vlm_eagle),
}
