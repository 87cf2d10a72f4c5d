"""When to offer that the draft model learns from one's own texts."""

from __future__ import annotations

COMMAND = "python -m dflash_mlx.train.adapt"
_WELL_BELOW = 0.8  # of the usual tokens a round
_ROUNDS = 500  # that tell


def offer(here: float, usual: float, rounds: int) -> str:
    """A line that offers it where drafts of these texts fall well short, else "".

    here, usual: tokens a round on these texts, the mean of `rounds`, and of this drafter elsewhere.
    """
    if rounds < _ROUNDS or here >= _WELL_BELOW * usual:
        return ""
    fewer = f"drafts bring {here:.1f} tokens a round on your texts, where {usual:.1f} are usual"
    return f"{fewer}; {COMMAND} adapts the draft model to them"
