"""The files of masked diffusion models: ours, and published ones told in our words.

The fields of ours, and what the names of published classes say, are on the page of formats
(docs/formats.md).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dflash_mlx.drafters.formats import FileFormat
from dflash_mlx.drafters.networks.fields import Fields, architecture, flag
from dflash_mlx.drafters.networks.files import FLOATING, in_words
from dflash_mlx.drafters.specdiff.model import MaskedModel, Network, NetworkConfig

OURS = "MaskedDiffusionDraftModel"
USUAL_BLOCK = 8  # where a file says none


@dataclass(frozen=True)
class Published:
    """What the name of a published class says."""

    head_norms: bool  # whether its attention norms queries and keys
    bias: bool  # whether its attention has biases, where the config.json says nothing
    mask: int | None = None  # what its authors' code takes where the config.json has none
    block: int | None = None  # what that code takes where there is no block_size
    shifted: bool = False  # as `logits_shifted`


PUBLISHED = {
    "A2DLlamaLMHeadModel": Published(head_norms=False, bias=False),
    "A2DQwen2LMHeadModel": Published(head_norms=False, bias=True, mask=151665),
    "A2DQwen3LMHeadModel": Published(head_norms=True, bias=False, mask=151669),
    "SDARForCausalLM": Published(head_norms=True, bias=False, mask=151669, block=4),
    "Fast_dLLM_QwenForCausalLM": Published(
        head_norms=False, bias=True, mask=151665, block=32, shifted=True
    ),
    # DiffuCoder's as well
    "DreamModel": Published(head_norms=False, bias=True, mask=151666, shifted=True),
}
# Masked diffusion models with layers of other kinds: recognised, to be refused by name.
OTHERS = (
    "LLaDAModelLM", "LLaDA2MoeModelLM", "SDARMoeForCausalLM", "DreamForCausalLM", "BD3LM", "MDLM",
)  # fmt: skip

_HEAD = "lm_head.weight"
_DROPPED = ("auto_map", "bd_size", "model_type", "transformers_version")
_READ = (
    "text is read causally here, but this model was trained to see later tokens too, all of them "
    "or those of its block, so it may guess less well than it could"
)


class MaskedFiles(FileFormat):
    """Masked diffusion models."""

    config, network, model = NetworkConfig, Network, MaskedModel
    known = (OURS,)
    classes = (("|".join((OURS, *PUBLISHED, *OTHERS)), ""),)

    def translate(self, raw: Fields, names: Collection[str]) -> Fields:
        kind = architecture(raw)
        if kind == OURS:
            return raw
        if kind not in PUBLISHED:
            known = ", ".join((OURS, *PUBLISHED))
            raise ValueError(f"architectures has {kind}, whose layers are not known; {known} are")
        own, told, notes = PUBLISHED[kind], dict(raw), [_READ]
        if flag(raw, "logits_shifted", own.shifted) != own.shifted:
            says = f"logits_shifted is {raw['logits_shifted']}"
            raise ValueError(f"{says}, but for {kind} it is {own.shifted}")
        if raw.get("mask_token_id") is None and own.mask is not None:
            told["mask_token_id"] = own.mask
            notes.append(
                f"no mask_token_id is given, so it is {own.mask}, as {kind} usually has it"
            )
        sizes = raw.get("block_size"), raw.get("bd_size"), own.block
        if (block := next((each for each in sizes if each is not None), None)) is None:
            block = USUAL_BLOCK
            notes.append(
                f"no block_size is given, so blocks have {block} tokens; one there changes it"
            )
        told |= {"architectures": [OURS], "block_size": block, "notes": notes}
        told |= {"head_norms": own.head_norms, "logits_shifted": own.shifted}
        told |= {"own_embedding": True, "own_head": True}
        if raw.get("attention_bias") is None:
            told["attention_bias"] = own.bias
        if raw.get("tie_word_embeddings") is None:
            told["tie_word_embeddings"] = bool(names) and _HEAD not in names
        return {name: value for name, value in told.items() if name not in _DROPPED}

    def our_names(self, names: Collection[str]) -> dict[str, str]:
        return {name: name.removeprefix("model.") for name in names}  # of all but the head

    def optional(self, config: NetworkConfig) -> dict[str, str]:
        # Some published folders have a copy of the embedding that they tie to it
        shape = config.vocab_size, config.hidden_size
        return {_HEAD: in_words(FLOATING, shape)} if config.tied else {}


FILES = MaskedFiles()
