"""What becomes of a field of a draft model's config.json: it is read, refused, or says nothing.

A drafter that is read wrongly still answers right, only never faster, and nothing tells its user
why. So no field that may matter is passed over. In a part that describes the method, every field is
known or refused by its name. Beside the network's own sizes stand fields of its target, of training
and of libraries, more than anybody can list; there those known to matter are refused or noted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.drafters.networks.fields import Fields

OTHER_DRAFTER = "choose another drafter with --drafter, or --method none"
_UNKNOWN = (
    "remove the field if it only describes training or another program's settings, else "
    + OTHER_DRAFTER
)
_LONGEST = 80  # characters of a value in a message
NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})  # values that ask for nothing


class Unsupported(ValueError):
    """A draft model says something that its network here does not do."""

    def __init__(self, what: str, next_step: str = OTHER_DRAFTER) -> None:
        super().__init__(what)
        self.next_step = next_step


@dataclass(frozen=True)
class Refused:
    """A field that asks for something that is not supported, in most of its values."""

    why: str  # behind the field and its value
    harmless: tuple[Any, ...] = NOTHING
    # What a name of its tensors holds then; in a file without, the field is a target's or idle
    tensor: str = ""

    def contradicted(self, names: Collection[str]) -> bool:
        """Whether the tensors beside a file show that it does not describe its drafter."""
        return bool(self.tensor and names) and not any(self.tensor in name for name in names)


@dataclass(frozen=True)
class Part:
    """The fields that a part of a config.json may have."""

    read: Collection[str] = ()
    noted: Collection[str] = ()  # which change nothing, though they look as if they could
    silent: Collection[str] = ()  # which change nothing, and nobody would think that they do
    refused: Mapping[str, Refused] = field(default_factory=dict)
    is_open: bool = False  # to others beside them, which nobody can list

    def review(self, given: Fields, name: str = "", names: Collection[str] = ()) -> Iterator[str]:
        """The fields that are left out and noted; Unsupported for one that cannot be.

        name: of the part in the file, "" for the file itself. names: of the tensors beside it, ()
        where these are not known.
        """
        for own, value in given.items():
            place = f"{name}.{own}" if name else own
            refused = self.refused.get(own)
            if own in self.noted or (refused and refused.contradicted(names)):
                if value not in NOTHING:
                    yield place
            elif refused:
                _check(place, value, refused)
            elif not self.is_open and own not in self.read and own not in self.silent:
                _check(place, value, Refused("a field that this program does not know"), _UNKNOWN)
                yield place


def note_of(places: Iterable[str]) -> tuple[str, ...]:
    """What a drafter says of the fields that were left out."""
    listed = ", ".join(dict.fromkeys(places))
    return (f"not read, since nothing here depends on it: {listed}",) if listed else ()


def _check(place: str, value: Any, refused: Refused, next_step: str = OTHER_DRAFTER) -> None:
    if value not in refused.harmless:
        text = repr(value)
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
        raise Unsupported(f"{place} is {text}, {refused.why}", next_step)


# Fields of transformers' configurations that a network's layers do not depend on
LIBRARY = frozenset({
    "_attn_implementation", "_name_or_path", "add_cross_attention", "architectures",
    "attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "dtype", "eos_token_id",
    "finetuning_task", "has_no_defaults_at_init", "id2label", "initializer_range", "is_decoder",
    "is_encoder_decoder", "label2id", "model_type", "name_or_path", "output_attentions",
    "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "sep_token_id",
    "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
# Of vLLM's library beside the network, whatever the drafter
SPECULATORS_READ = frozenset({
    "speculators_model_type", "transformer_layer_config", "draft_vocab_size", "target_hidden_size",
    "num_target_layers", "tie_word_embeddings", "quantization", "quantization_config", "notes",
})  # fmt: skip
SPECULATORS_SILENT = LIBRARY | {"speculators_config", "speculators_version", "embed_requires_grad"}
_SINKS = Refused("but attention sinks are not supported", tensor="sink")
_LATENT = Refused(
    "but attention over latent keys and values (MLA) is not supported", tensor="kv_a_proj"
)
# Fields beside the network's own that change what it does, whatever the drafter
NETWORK_REFUSED: Mapping[str, Refused] = {
    "attention_sink_bias": _SINKS,
    "add_swa_attention_sink_bias": _SINKS,
    "swa_attention_sink_enabled": _SINKS,
    "kv_lora_rank": _LATENT,
    "q_lora_rank": _LATENT,
    "logit_scale": Refused("but scaled logits are not supported", (*NOTHING, 1)),
    "mlp_bias": Refused("but biases of the MLP are not supported", tensor="down_proj.bias"),
}
# Of a target, which trainers copy into its drafter's file, and which the tensors contradict
COPIED = (
    "attn_output_gate", "output_gate_type", "mrope_section", "mrope_interleaved",
)  # fmt: skip
