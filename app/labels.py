"""What the settings of decoding and sampling are called on screen, in the order of the screen."""

from __future__ import annotations

OTHER = "Other"
LABELS = {
    "The answer": {
        "temperature": "Temperature",
        "max_tokens": "Longest answer",
        "stop": "Texts that end the answer",
    },
    "How drafts are made and accepted": {
        "method": "Method",
        "lookup": "Look up what was said before",
        "budget": "Tokens checked in one pass",
        "block_size": "Tokens in a draft block",
        "branches": "Branches of the second draft, or samples of the first",
        "growth": "Growth of the tree",
        "steps": "Passes that denoise a draft",
        "schedule": "What each of them fixes",
        "acceptance": "Acceptance",
        "exact": "Near-ties as in plain decoding",
        "recalibrate": "Time this machine again",
    },
    "How the next token is drawn": {
        "top_p": "Likeliest tokens, by probability (top-p)",
        "top_k": "Likeliest tokens, by number (top-k)",
        "min_p": "Least share of the likeliest (min-p)",
        "repetition_penalty": "Penalty for repeating",
        "repetition_context": "Tokens that count as repeated",
        "seed": "Random seed",
    },
    OTHER: {"prefill_step": "Tokens of the prompt in one pass"},
}


def label_of(name: str) -> str:
    """What a setting is called on screen; one that nobody named is called as in files."""
    known = {field: label for group in LABELS.values() for field, label in group.items()}
    return known.get(name, name.replace("_", " ").capitalize())
