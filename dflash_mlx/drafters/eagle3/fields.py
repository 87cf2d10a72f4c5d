"""The fields of EAGLE-3's files: which are known, and the layers that they name.

`eagle_config.eagle_aux_hidden_state_layer_ids`, of raw files, are layers whose output is read, as
SGLang takes them; so are DeepSpec's `target_layer_ids`. The first of these names outside of
`eagle_config`, speculators' and vLLM's, numbers hidden states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dflash_mlx.drafters.eagle3.model import USUAL_TAPS
from dflash_mlx.drafters.networks.fields import (
    Fields,
    flag,
    layers_of_states,
    listed,
    named,
    part,
    whole,
)
from dflash_mlx.drafters.networks.known_fields import (
    COPIED,
    NETWORK_REFUSED,
    SPECULATORS_READ,
    SPECULATORS_SILENT,
    Part,
    Refused,
    Unsupported,
)

METHOD = "eagle_config"
LAYERS_READ = "eagle_aux_hidden_state_layer_ids"
DEEPSPEC = "target_layer_ids"
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
COUNTS = ("num_aux_hidden_states", "num_aux_layers")  # of layers that are read
POST_NORM = "return_hidden_post_norm"  # TensorRT-LLM's name of `norm_output`
SWITCHES = {  # of eagle_config: what only this network does
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}

PARALLEL, DEPTHS = "parallel_drafting", "num_depths"  # of P-EAGLE
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
_OF_PARALLEL = {PARALLEL, DEPTHS, *MASKS}

_REFUSED = {
    **NETWORK_REFUSED,
    "eh_proj_before_attn": Refused("but a projection before attention is not supported"),
}
_IN_METHOD = Part(
    read={LAYERS_READ, *NORMS, POST_NORM, *SWITCHES, *COUNTS, *_OF_PARALLEL},
    silent=("next_layer_regular", "parallel_draft_heads_num_layers"),  # of more steps and layers
    refused=_REFUSED,
)
_AROUND = Part(noted=(*COPIED, "partial_rotary_factor"), refused=_REFUSED, is_open=True)
_IN_SPECULATORS = Part(
    read={*SPECULATORS_READ, METHOD, LAYERS_READ, *NORMS, *_OF_PARALLEL},
    silent=SPECULATORS_SILENT,
    refused=_REFUSED,
)


def review(raw: Fields, names: Collection[str], is_speculators: bool) -> Iterator[str]:
    """The fields that change nothing; Unsupported for one that is not known."""
    yield from _IN_METHOD.review(part(raw, METHOD), METHOD, names)
    if is_speculators:
        yield from _IN_SPECULATORS.review(raw, names=names)
        layers = raw.get("transformer_layer_config")
        raw = layers if isinstance(layers, dict) else {}
    yield from _AROUND.review(raw, names=names)


def aux_layers(raw: Fields, method: Fields) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Layers whose outputs are read, None where no field says so; and what had to be assumed.

    Raises ValueError for fields that name different layers, or another number of them.
    """
    found: dict[str, tuple[int, ...]] = {}
    notes: tuple[str, ...] = ()
    if (ids := method.get(LAYERS_READ)) is not None:
        found[f"{METHOD}.{LAYERS_READ}"] = _layers(ids, LAYERS_READ)
    if (ids := raw.get(DEEPSPEC)) is not None:
        found[DEEPSPEC] = _layers(ids, DEEPSPEC)
    if not found and (ids := raw.get(LAYERS_READ)) is not None:
        layers, note = layers_of_states(ids, LAYERS_READ)
        found[LAYERS_READ], notes = tuple(layers), (note,)
    if len(set(found.values())) > 1:
        raise ValueError(" and ".join(f"{name} are {[*ids]}" for name, ids in found.items()))
    layers_read = next(iter(found.values()), None)
    count = USUAL_TAPS if layers_read is None else len(layers_read)
    for name, given in named({**method, **raw}, COUNTS).items():
        if given != count:
            raise ValueError(f"{name} is {given!r}, but {count} layers are read")
    return layers_read, notes


def is_parallel(fields: Fields, names: Collection[str]) -> bool:
    """Whether all rows of a draft go through in one pass, P-EAGLE's; ValueError for yes and no."""
    signs = named(fields, MASKS)
    if whole(fields, DEPTHS, default=0) > 1:
        signs[DEPTHS] = fields[DEPTHS]
    if fields.get(PARALLEL) is None:
        return bool(signs) or any(name.endswith("mask_hidden") for name in names)
    if signs and not flag(fields, PARALLEL):
        raise ValueError(f"{PARALLEL} is false, but {signs} are P-EAGLE's")
    return flag(fields, PARALLEL)


def mask_token(fields: Fields) -> int:
    """The token of rows that have none; Unsupported where a file does not say it."""
    given = {name: whole(fields, name) for name in named(fields, MASKS)}
    if not given:
        raise Unsupported(
            "a drafter of P-EAGLE does not say which token its masks are",
            "add mask_token_id to it, the token that it was trained with",
        )
    if len(set(given.values())) > 1:
        raise ValueError(f"{' and '.join(given)} contradict each other: {given}")
    return next(iter(given.values()))


def _layers(ids: object, name: str) -> tuple[int, ...]:
    if not (numbers := listed(ids, name, int)) or min(numbers) < 0:
        raise ValueError(f"{name} are {ids!r}, not numbers from 0 up")
    return tuple(whole({name: number}, name) for number in numbers)
