"""Readers of `reference_formats.py` that call packages for PyTorch.

Attention is PyTorch's plain function: flex attention needs a compiler, so masks are made dense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from reference_case import MASKS, SCALES, Case, check_path
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention

GEMMA = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}
torch.manual_seed(0)
torch.set_grad_enabled(False)


def tensor(array: Any) -> Any:
    return torch.as_tensor(array)


def filled(model: Any, case: Case, strip: str = "") -> Any:
    """The model with the folder's tensors, and the target's tables where it has none."""
    stored = load_file(case.folder / "model.safetensors")
    stored = {name.removeprefix(strip): array for name, array in stored.items()}
    own = model.state_dict()
    stored = {n: t.reshape(own[n].shape) if n in own else t for n, t in stored.items()}
    missing, unexpected = model.load_state_dict(stored, strict=False)
    tables = {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}
    for name in list(missing):
        if (table := tables.get(name.removeprefix("model."))) is not None:
            model.get_parameter(name).copy_(tensor(case.arrays[table]))
            missing.remove(name)
    missing = [n for n in missing if not n.startswith("verifier") and n not in ("d2t", "t2d")]
    unexpected = [n for n in unexpected if n not in tables and n != "verifier_norm.weight"]
    if missing or unexpected:
        raise ValueError(f"missing {missing}, unexpected {unexpected}")
    return model.eval()


def table(case: Case, model: Any, name: str, ours: str) -> Any:
    stored = load_file(case.folder / "model.safetensors")
    return stored.get(f"{name}.weight", tensor(case.arrays[ours]))


def qwen3(case: Case) -> Any:
    from transformers import Qwen3Config

    raw = {k: v for k, v in case.raw.items() if v is not None}
    config = Qwen3Config(**raw)
    config._attn_implementation = "eager"
    return config


def states(case: Case, model: Any, **more: Any) -> tuple[Any, Any]:
    """All rows' final states [1, B, d], and their embeddings."""
    rows, embedding = case.block, table(case, model, "embed_tokens", "embedding")
    x = embedding[torch.tensor(rows)][None]
    places = torch.arange(len(case.features) + len(rows))[None]
    names = {"position_ids": places, "noise_embedding": x, "attention_mask": None, **more}
    features = tensor(case.features)[None]
    return model(target_hidden=features, **names), embedding


def specforge(case: Case) -> Any:
    from specforge.modeling.draft import DFlashDraftModel, DominoDraftModel, DSparkDraftModel

    is_domino = case.method.get("projector_type") == "domino"
    known = {"DFlashDraftModel": DFlashDraftModel, "DSparkDraftModel": DSparkDraftModel}
    made = DominoDraftModel if is_domino else known.get(case.kind)
    scaled = any(case.field(name) for name in SCALES)
    if made is None or case.library or case.slides or case.field("is_causal") or scaled:
        return None
    model = filled(made(qwen3(case)), case)
    hidden, embedding = states(case, model)
    head = table(case, model, "lm_head", "head")
    base, tokens = hidden @ head.T, torch.tensor([case.anchor, *case.path])
    if is_domino:
        given = embedding[tokens[: len(case.block)]][None, None]
        base = model.apply_logits_head(
            base[None], prev_token_embeddings=given, hidden_states=hidden[None]
        )[0]
    if made is DSparkDraftModel:
        base = model.apply_logits_head(base, prev_token_ids=tokens[None, :-1], hidden_states=hidden)
    return base[0, int(case.first) :]


def dense(query: Any, key: Any, value: Any, **_: Any) -> Any:
    """Causal attention, as P-EAGLE's is where one chain stands behind its text."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def parallel(case: Case) -> tuple[Any, Any, int]:
    """Rows and features of a P-EAGLE draft: text, the anchor, masks; the last without."""
    depths = len(case.path) + 1
    mask = next(case.field(n) for n in MASKS if case.field(n) is not None)
    rows = [*case.tokens[1:], case.anchor, *[mask] * (depths - 1)]
    return torch.tensor([rows]), tensor(case.features)[None], depths


def specforge_steps(case: Case) -> Any:
    raw = {**case.raw, **case.raw.get("eagle_config", {})}
    usual = ("LlamaForCausalLMEagle3", "LlamaForCausalLM")
    if case.kind not in usual or any(raw.get(name) is not None for name in MASKS):
        return None
    if case.raw.get("attention_bias"):
        return None
    if any(raw.get(name) for name in ("norm_before_residual", "norm_output", "fc_norm")):
        return None  # its layer adds to the state before its norm
    from specforge.modeling.draft import LlamaForCausalLMEagle3
    from specforge.modeling.draft.llama3_eagle import prepare_decoder_attention_mask
    from transformers import LlamaConfig

    config = LlamaConfig(**case.raw)
    config.draft_vocab_size = case.raw.get("draft_vocab_size") or config.vocab_size
    model, told = filled(LlamaForCausalLMEagle3(config), case), []
    h = model.project_hidden_states(tensor(case.features)[None])
    ids, length = [*case.tokens[1:], case.anchor, *case.path], len(case.tokens)
    every = torch.ones(1, length, dtype=torch.bool)
    mask = prepare_decoder_attention_mask(every, (1, length), h, 0)
    kept: list[list[Any]] = [[], []]
    for step in range(len(case.path) + 1):
        x = model.embed_input_ids(torch.tensor([ids[step : step + length]]))
        places = torch.arange(length)[None]
        h = model.backbone(x, h, kept, mask, places)
        told.append(model.compute_logits(h)[0, -1])
    return torch.stack(told)


def specforge_peagle(case: Case) -> Any:
    if case.kind != "PEagleDraftModel":
        return None
    from specforge.modeling.draft import peagle
    from transformers import LlamaConfig

    peagle.compile_friendly_flex_attention = dense
    stored = load_file(case.folder / "model.safetensors")
    model = peagle.PEagleDraftModel(LlamaConfig(**case.raw))
    renamed = {n.replace("midlayer.", "layers.0."): t for n, t in stored.items()}
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    assert not unexpected and set(missing) <= {"t2d", "d2t"}, (missing, unexpected)
    rows, features, depths = parallel(case)
    learned = model.mask_hidden.expand(1, depths - 1, -1)
    h = model.project_hidden_states(torch.cat([features, learned], dim=1))
    places = torch.arange(rows.shape[1])[None]
    out = model.backbone(model.embed_input_ids(rows), h, position_ids=places)
    return model.compute_logits(out)[0, -depths:]


def automodel_peagle(case: Case) -> Any:
    if case.kind != "LlamaEagle3DraftModel" or not case.field("num_depths"):
        return None
    from nemo_automodel.components.speculative.eagle import peagle_draft
    from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel
    from transformers import LlamaConfig

    peagle_draft._peagle_flex_attention = lambda q, k, v, **_: dense(q, k, v)
    config = LlamaConfig(**case.raw)
    config.draft_vocab_size = case.raw["draft_vocab_size"]
    model = filled(LlamaEagle3DraftModel(config).float(), case)
    rows, features, depths = parallel(case)
    h = model.project_hidden_states(features)
    learned = model.masked_projected_hidden()[None].expand(1, depths - 1, -1)
    places = torch.arange(rows.shape[1])[None]
    out = model.forward_peagle(rows, torch.cat([h, learned], dim=1), places, None)
    return model.compute_logits(out)[0, -depths:]


def automodel_dflash2(case: Case) -> Any:
    if case.kind != "DFlash2DraftModel" or case.library or case.slides:
        return None
    from nemo_automodel.components.speculative.dflash.draft_qwen3_dflash2 import (
        Qwen3DFlash2DraftModel,
    )

    if any(case.field(name) for name in SCALES):
        return None
    model = filled(Qwen3DFlash2DraftModel(qwen3(case)).float(), case)
    hidden, _ = states(case, model, conv_block_size=len(case.block))
    logits = hidden[:, 1:] @ tensor(case.arrays["head"]).T
    tokens, *_ = model.candidate_selector.walk(
        hidden[:, 1:], logits, torch.tensor([case.anchor]), 0.0
    )
    check_path(case, tokens[0].tolist())
    return logits[0]


def automodel_dspark(case: Case) -> Any:
    from nemo_automodel.components.speculative.dspark.draft_gemma4 import Gemma4DSparkModel
    from nemo_automodel.components.speculative.dspark.draft_qwen3 import Qwen3DSparkModel
    from transformers import PretrainedConfig, Qwen3Config

    known = {  # Gemma's configuration has some fields by layer, which the module does not expect
        "Gemma4DSparkModel": (Gemma4DSparkModel, PretrainedConfig),
        "Qwen3DSparkModel": (Qwen3DSparkModel, Qwen3Config),
    }
    if case.kind not in known:
        return None
    made, config_of = known[case.kind]
    config = config_of(**case.raw)
    for name, value in {**GEMMA, **case.raw}.items():
        if not hasattr(config, name):
            setattr(config, name, value)
    config.head_dim = case.raw.get("global_head_dim") or config.head_dim
    config._attn_implementation = "eager"
    model = filled(made(config).float(), case)
    places = torch.arange(len(case.features) + len(case.block))[None]
    hidden = model._forward_backbone(
        position_ids=places,
        noise_embedding=model.embed_tokens(torch.tensor([case.block])),
        target_hidden_states=tensor(case.features)[None],
    )
    logits = model.compute_logits(hidden)
    if model.markov_head is None:
        return logits[0]
    return model.markov_head.apply_block_logits(
        logits, token_ids=torch.tensor([case.before]), hidden_states=hidden
    )[0]


def speculators_blocks(case: Case) -> Any:
    if case.library not in ("dflash", "dspark"):
        return None
    from speculators.models.dflash import core
    from speculators.models.dspark import core as dspark

    made = core.DFlashDraftModel if case.library == "dflash" else dspark.DSparkDraftModel
    model = filled(made(library_config(made.config_class, case)), case)
    length, rows = len(case.tokens), len(case.block)
    core.select_anchors = lambda *given: (torch.tensor([length]), torch.tensor([True]))
    core._compiled_create_block_mask = core.create_block_mask
    ids = torch.tensor([[*case.tokens, case.anchor, *[0] * (2 * rows)]])
    features = torch.zeros(1, ids.shape[1], case.features.shape[1])
    features[0, :length] = tensor(case.features)
    hidden, logits, *_ = model._backbone_forward(
        features, ids, torch.ones(ids.shape), torch.zeros(1, ids.shape[1], 64),
        torch.zeros(ids.shape, dtype=torch.long), max_anchors=1,
    )  # fmt: skip
    logits, hidden = logits[:, int(case.first) :], hidden[:, int(case.first) :]
    if getattr(model, "markov_head", None) is None:
        return logits[0]
    before = torch.tensor([case.before])
    seen = model.markov_head.prev_embeddings(before)
    return (logits + model.markov_head.block_bias(
        prev_token_ids=before, hidden_states=hidden, prev_emb=seen
    ))[0]  # fmt: skip


def library_config(made: Any, case: Case) -> Any:
    """With what the library asks for beside what its readers elsewhere need."""
    method = dict(case.raw["speculators_config"])
    method.setdefault("proposal_methods", [{"proposal_type": "greedy", "speculative_tokens": 5}])
    method.setdefault("default_proposal_method", "greedy")
    verifier = {"name_or_path": None, "architectures": ["LlamaForCausalLM"]}
    method["verifier"] = verifier
    layers = {"use_sliding_window": case.slides, **case.raw["transformer_layer_config"]}
    config = made(**{**case.raw, "speculators_config": method, "transformer_layer_config": layers})
    config.transformer_layer_config._attn_implementation = "eager"
    return config


def speculators_steps(case: Case) -> Any:
    if case.library not in ("eagle3", "peagle"):
        return None
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.peagle import core as peagle

    is_parallel = case.library == "peagle"
    made = peagle.PEagleDraftModel if is_parallel else Eagle3DraftModel
    model = filled(made(library_config(made.config_class, case)), case)
    told: list[Any] = []
    model.lm_head.register_forward_hook(lambda module, given, out: told.append(out))
    steps, length = len(case.path) + 1, len(case.tokens)
    ids = torch.tensor([[*case.tokens[1:], case.anchor, *case.path, 0]])
    features = torch.zeros(1, ids.shape[1], case.features.shape[1])
    features[0, :length] = tensor(case.features)
    documents = torch.zeros(ids.shape, dtype=torch.long)
    if not is_parallel:
        model(features, ids, documents, ttt_steps=steps)
        return torch.stack([logits[0, length - 1] for logits in told])
    starts = torch.cat([torch.arange(length), torch.full((steps - 1,), length - 1)])
    depths = torch.cat([torch.zeros(length, dtype=torch.long), torch.arange(1, steps)])
    peagle.generate_cod_sample_indices = lambda **_: (starts, depths)
    peagle.compute_metrics = lambda **_: (None, None)
    model(features, ids, documents, verifier_last_hidden_states=torch.zeros(1, ids.shape[1], 64))
    return told[0][0, length - 1 :]


READERS: dict[str, tuple[Callable[[Case], Any], ...]] = {
    "specforge": (specforge, specforge_steps, specforge_peagle),
    "nemo-automodel": (automodel_dflash2, automodel_dspark, automodel_peagle),
    "speculators": (speculators_blocks, speculators_steps),
}
