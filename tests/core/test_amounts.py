"""Bytes for people."""

import pytest

from dflash_mlx.client import amount


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 kB"), (1500, "1.5 kB"), (98_362_432, "98.4 MB"), (2.28e9, "2.28 GB")],
)
def test_bytes_are_told_in_thousands(count, shown):
    assert amount(count) == shown
