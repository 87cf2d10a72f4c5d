"""Bytes for people."""

from __future__ import annotations


def amount(count: float) -> str:
    """As 98.4 MB, 2.28 GB; in thousands, as disks are sold."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{count / 1000:.1f} kB" if count else "0 kB"


def memory(needs: int, there: int, about: str = "") -> str:
    """What a model needs, and whether that is there. about: before an amount that is a guess."""
    fits = "fits" if needs <= there else "does not fit"
    return f"needs {about}{amount(needs)}, {fits}"
