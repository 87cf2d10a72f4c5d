"""In which order a draft that is denoised in several steps fixes its tokens."""

from __future__ import annotations

from dflash_mlx.core.errors import DFlashError

IN_ORDER, THRESHOLD = "left-to-right", "threshold"
SCHEDULES = ("confidence", IN_ORDER, THRESHOLD)


def check_schedule(steps: int, schedule: str, rejects: bool) -> None:
    """Raise DFlashError for a schedule whose drafts have no law for p/q.

    One step fixes nothing in between, so it goes with every schedule. rejects: whether rejection
    sampling was asked for. It has to know what each token was drawn from given those before it.
    Where a later token is fixed first, and an earlier one by it, that law is neither pass's:
    min(1, p/q) with the passes' own q is wrong.
    """
    if rejects and steps > 1 and schedule != IN_ORDER:
        what = f"acceptance is reject, but the {schedule} schedule with {steps} steps fixes tokens "
        what += "out of order, so the law that they were drawn from is not known"
        step = f"choose the schedule {IN_ORDER}, one step, or acceptance match"
        raise DFlashError(what, step, "acceptance")
