"""Whether a drafter folder that ships a tokenizer ships that of its target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_mlx.core.findings import Finding, Refused
from dflash_mlx.models.compatibility.model_source import ModelSource, read_json

FILE = "tokenizer.json"
_CHOOSE = "choose the drafter of this model with --drafter, or --method none"
_REPLACE = "download this folder again, or remove the file where it is the drafter's"


def check_tokenizers(target: ModelSource, drafter: ModelSource) -> Iterator[Finding]:
    """The first token that has another id in the target's tokenizer, if both have a tokenizer."""
    if FILE not in target.files or FILE not in drafter.files:
        return
    try:
        theirs, ours = vocabulary(drafter), vocabulary(target)
    except Refused as refusal:
        yield refusal.finding
        return
    other = {token for token, index in theirs.items() if ours.get(token, index) != index}
    if other or theirs.keys().isdisjoint(ours):
        token = min(other or theirs, key=lambda token: theirs[token])
        found, expected = str(theirs[token])[:80], str(ours.get(token, "none"))[:80]
        what = (
            f"token {token[:40]!r} has the id {found} in {drafter.place(FILE)}, "
            f"but {expected} in {target.place(FILE)}"
        )
        place = drafter.place(FILE)
        yield Finding("error", what, _CHOOSE, place, token[:40], found, expected)


def vocabulary(source: ModelSource) -> dict[str, int]:
    """All tokens of a tokenizer.json with their ids, added ones included.

    Raises Refused where it cannot be read or names no token.
    """
    tokenizer, place = read_json(source, FILE), source.place(FILE)
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list):
        shown = repr(added)[:80]
        what = f"added_tokens in {place} is {shown}, not a list"
        raise Refused(Finding("error", what, _REPLACE, place, "added_tokens", shown, "a list"))
    named = _model_tokens(tokenizer.get("model"))
    for entry in added:
        if isinstance(entry, dict) and type(entry.get("id")) is int:
            named[str(entry.get("content"))] = entry["id"]
    if not named:
        what = f"{place} names no token"
        raise Refused(Finding("error", what, _REPLACE, place, "model.vocab", "none", "tokens"))
    return named


def _model_tokens(model: Any) -> dict[str, int]:
    tokens = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(tokens, dict):
        return {str(token): i for token, i in tokens.items() if type(i) is int}
    if not isinstance(tokens, list):
        return {}
    # of a unigram model: tokens with scores, in the order of ids
    return {str(entry[0]): i for i, entry in enumerate(tokens) if isinstance(entry, list) and entry}
