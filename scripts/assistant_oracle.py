"""Writes what transformers drafts with tiny random assistants of Gemma 4.

The numbers that the suite compares with, in tests/data/assistants.json. It needs torch, so it runs
in an environment of its own:

    python -m venv DIR && DIR/bin/pip install torch transformers==5.14.1
    DIR/bin/python scripts/assistant_oracle.py

(5.23 cannot make an assistant: its check of shared keys and values refuses a model all of whose
layers share.) The draft is `SinglePositionMultiTokenCandidateGenerator`'s own. It gets the keys of
a sliding layer that the target's cache keeps, window - 1; the mask of an assistant, which counts
from the last key, would let two more through.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from support.assistant_formats import (  # noqa: E402
    CASES,
    LENGTHS,
    STEPS,
    WINDOW,
    text_of,
    weight,
)

_DIGITS = 6  # of logits near 1


def fill(model: Any, seed: int) -> dict[str, list[int]]:
    """Give a model the numbers of its tensors' names; their shapes, as a file would have them."""
    shapes = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name != "lm_head.weight":  # which is the embedding
                tensor.copy_(torch.tensor(weight(name, tuple(tensor.shape), seed)))
                shapes[name] = list(tensor.shape)
    return shapes


def made(raw: dict[str, Any], text_only: bool = False) -> Any:
    """The model that a config.json describes; text_only: its language model."""
    raw = raw.get("text_config", raw) if text_only else raw
    config = transformers.AutoConfig.for_model(**raw)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def draft(target: Any, assistant: Any, length: int) -> dict[str, Any]:
    """Behind a text of this length: the drafted tokens, and the logits [steps, V] of each."""
    tokens = text_of(length)
    committed = torch.tensor([tokens[:-1]])
    with torch.no_grad():
        out = target(committed, output_hidden_states=True, return_shared_kv_states=True)
    kept = {"full_attention": length, "sliding_attention": WINDOW - 1}
    out.shared_kv_states = {
        kind: tuple(part[:, :, -kept[kind] :] for part in both)
        for kind, both in out.shared_kv_states.items()
    }
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.max_length = STEPS, 100
    settings.eos_token_id = None
    known = torch.tensor([tokens])
    generator = SinglePositionMultiTokenCandidateGenerator(
        known, assistant, target.get_input_embeddings(), settings, {}
    )
    ids, logits = generator.get_candidates(known, {}, out, False, length - 1)
    return {
        "length": length,
        "drafted": ids[0, length + 1 :].tolist(),
        "logits": [[round(x, _DIGITS) for x in row] for row in logits[0].tolist()],
    }


def main() -> None:
    found: dict[str, Any] = {"transformers": transformers.__version__}
    for name, (raw, theirs) in CASES.items():
        assistant, target = made(raw), made(theirs, text_only=True)
        tensors = fill(assistant, 1)
        fill(target, 2)
        drafts = [draft(target, assistant, length) for length in LENGTHS]
        found[name] = {"tensors": tensors, "drafts": drafts}
    (ROOT / "tests/data/assistants.json").write_text(json.dumps(found, separators=(",", ":")))


if __name__ == "__main__":
    main()
