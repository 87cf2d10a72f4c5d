"""Bytes for people."""

from __future__ import annotations


def amount(count: float) -> str:
    """As 98.4 MB, 2.28 GB; in thousands, as disks and downloads are told."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{count / 1000:.1f} kB" if count else "0 kB"
