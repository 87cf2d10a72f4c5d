"""Whether a drafter folder that ships a tokenizer ships that of its target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_mlx.compatibility.model_source import ModelSource, read_json
from dflash_mlx.findings import Finding, Refused

FILE = "tokenizer.json"
_CHOOSE = "choose the drafter of this model with --drafter, or --method none"


def check_tokenizers(target: ModelSource, drafter: ModelSource) -> Iterator[Finding]:
    """The first token that has another id in the target's tokenizer, if both have a tokenizer."""
    if FILE not in target.files or FILE not in drafter.files:
        return
    try:
        theirs, ours = (vocabulary(read_json(source, FILE)) for source in (drafter, target))
    except Refused as refusal:
        yield refusal.finding
        return
    other = {token for token, index in theirs.items() if ours.get(token, index) != index}
    if other or theirs.keys().isdisjoint(ours):
        token = min(other or theirs, key=lambda token: theirs[token])
        found, expected = theirs[token], ours.get(token, "none")
        what = (
            f"token {token[:40]!r} has the id {found} in {drafter.place(FILE)}, "
            f"but {expected} in {target.place(FILE)}"
        )
        place = drafter.place(FILE)
        yield Finding("error", what, _CHOOSE, place, token[:40], str(found), str(expected))


def vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """All tokens of a tokenizer.json with their ids, added ones included."""
    model = tokenizer.get("model")
    tokens = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(tokens, list):  # of a unigram model: tokens with scores, in the order of ids
        named = {
            str(entry[0]): i for i, entry in enumerate(tokens) if isinstance(entry, list) and entry
        }
    else:
        named = (
            {str(k): i for k, i in tokens.items() if type(i) is int}
            if isinstance(tokens, dict)
            else {}
        )
    for entry in tokenizer.get("added_tokens") or []:
        if isinstance(entry, dict) and type(entry.get("id")) is int:
            named[str(entry.get("content"))] = entry["id"]
    return named
