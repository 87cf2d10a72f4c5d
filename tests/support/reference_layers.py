"""Sub-layers of published heads in straight NumPy float64, by the names that checkpoints have.

Grouped attention, and DeepSeek's experts: the likeliest of the likeliest groups, one by one, and a
shared one. Imports no mlx.

Letters: d hidden size, n rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from support.reference_dflash import Array, Config, rms_norm, rotate, softmax

Shapes = dict[str, tuple[int, ...]]


def part(weights: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """Those under a prefix, without it."""
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def causal(scores: Array) -> Array:
    """Weights of attention [n, n] of scores, where no row sees one behind it."""
    return softmax(np.where(np.tri(len(scores), dtype=bool), scores, -np.inf))


def attention_shapes(raw: Config, norms: str = "", place: str = "self_attn.") -> Shapes:
    """Of grouped attention. norms: which of q and k have one."""
    d, heads = raw["hidden_size"], raw["num_attention_heads"]
    dim = raw.get("head_dim") or d // heads
    rows = {"q": heads * dim, **dict.fromkeys("kv", raw_keys(raw) * dim)}
    shapes: Shapes = {f"{place}{name}_proj.weight": (size, d) for name, size in rows.items()}
    shapes[f"{place}o_proj.weight"] = (d, rows["q"])
    if raw.get("attention_bias", True):
        shapes |= {f"{place}{name}_proj.bias": (size,) for name, size in rows.items()}
    return shapes | {f"{place}{name}_norm.weight": (dim,) for name in norms}


def raw_keys(raw: Config) -> int:
    return int(raw["num_key_value_heads"])


def attention(weights: Mapping[str, Array], raw: Config, x: Array) -> Array:
    """Grouped attention of rows [n, d]; a share of each head turns, half against half."""
    heads, n = raw["num_attention_heads"], len(x)
    rows = {}
    for name, count in (("q", heads), ("k", raw_keys(raw)), ("v", raw_keys(raw))):
        y = x @ weights[f"{name}_proj.weight"].T + weights.get(f"{name}_proj.bias", 0.0)
        y = y.reshape(n, count, -1)
        if f"{name}_norm.weight" in weights:
            y = rms_norm(y, weights[f"{name}_norm.weight"], raw["rms_norm_eps"])
        turns = int(y.shape[-1] * raw.get("partial_rotary_factor", 1.0))
        if turns and name != "v":
            turned = rotate(y[..., :turns], np.arange(n), raw["rope_theta"])
            y = np.concatenate([turned, y[..., turns:]], axis=-1)
        rows[name] = y
    outputs = []
    for head in range(heads):
        shared = head // (heads // raw_keys(raw))
        scores = rows["q"][:, head] @ rows["k"][:, shared].T / np.sqrt(rows["q"].shape[-1])
        outputs.append(causal(scores) @ rows["v"][:, shared])
    return np.concatenate(outputs, axis=-1) @ weights["o_proj.weight"].T


def expert_shapes(raw: Config, names: Sequence[str], place: str) -> Shapes:
    """Of experts, the shared one and the gate; with projections around latent ones if there are."""
    d, count = raw["hidden_size"], raw["n_routed_experts"]
    width = raw.get("moe_latent_size") or d

    def of(one: str, read: int, rows: int) -> Shapes:
        down = (read, rows)
        return {f"{place}{one}.{n}.weight": down if "down" in n else down[::-1] for n in names}

    shapes: Shapes = {
        f"{place}gate.weight": (count, d),
        f"{place}gate.e_score_correction_bias": (count,),
    }
    for i in range(count):
        shapes |= of(f"experts.{i}", width, raw["moe_intermediate_size"])
    shared = raw.get("moe_shared_expert_intermediate_size", raw["moe_intermediate_size"])
    if width != d:
        shapes[f"{place}fc1_latent_proj.weight"] = (width, d)
        shapes[f"{place}fc2_latent_proj.weight"] = (d, width)
    return shapes | of("shared_experts", d, shared)


def experts(weights: Mapping[str, Array], raw: Config, x: Array, gated: bool) -> Array:
    """Rows [n, d] by the likeliest experts of the likeliest groups, and by the shared one."""

    def run(place: str, row: Array) -> Array:
        own = part(weights, place)
        up = own["up_proj.weight"] @ row
        if not gated:
            return own["down_proj.weight"] @ np.maximum(up, 0) ** 2
        gate = own["gate_proj.weight"] @ row
        return own["down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    out = []
    for row in x:
        scores = 1 / (1 + np.exp(-(weights["gate.weight"] @ row)))
        chosen = likeliest(scores + weights["gate.e_score_correction_bias"], raw)
        shares = scores[chosen]
        if raw["norm_topk_prob"]:
            shares = shares / shares.sum()
        shares = shares * raw["routed_scaling_factor"]
        read = (
            weights["fc1_latent_proj.weight"] @ row if "fc1_latent_proj.weight" in weights else row
        )
        y = sum(s * run(f"experts.{i}.", read) for i, s in zip(chosen, shares, strict=True))
        if "fc2_latent_proj.weight" in weights:
            y = weights["fc2_latent_proj.weight"] @ y
        out.append(y + run("shared_experts.", row))
    return np.stack(out)


def likeliest(scores: Array, raw: Config) -> Array:
    """The experts with the highest scores, of the groups whose best two are highest together."""
    groups = scores.reshape(raw["n_group"], -1)
    best = np.sort(groups, axis=-1)[:, -2:].sum(axis=-1)
    kept = np.argsort(-best)[: raw["topk_group"]]
    masked = np.full_like(groups, -np.inf)
    masked[kept] = groups[kept]
    return np.argsort(-masked.ravel())[: raw["num_experts_per_tok"]]
