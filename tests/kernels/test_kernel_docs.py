"""docs/kernels.md: its figures are those of its commands, and no kernel is missing."""

import re
import shlex
from pathlib import Path

import pytest

from kernels_metal.catalog import CATALOG
from kernels_metal.emulator import __main__ as emulator
from kernels_metal.operations import OPERATIONS

TEXT = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"\| (?:`(?P<command>\w+ --shape [^`]+)`)? ?\| (?P<array>[^|]+) "
    r"\| (?P<size>[\d,]+)(?: each)? \| (?P<read>[\d.,]+) \| (?P<fetched>[\d.,]+) \|"
)


def number(text):
    return float(text.replace(",", ""))


def documented():
    """By command: array, size, read and fetched of the rows with figures below it."""
    tables = {}
    for found in ROW.finditer(TEXT):
        if found["command"]:
            rows = tables.setdefault(found["command"], [])
        figures = [number(found[name]) for name in ("size", "read", "fetched")]
        rows += [(array, *figures) for array in found["array"].split(", ")]
    return tables


def test_every_operation_and_kernel_is_described():
    for name in (*CATALOG, *(operation.name for operation in OPERATIONS)):
        assert f"`{name}`" in TEXT


@pytest.mark.parametrize("command", documented())
def test_the_figures_are_those_of_the_command(command, capsys):
    assert emulator.main(shlex.split(command)) == 0
    printed = {}
    for line in capsys.readouterr().out.splitlines():
        name, *cells = line.split() or [""]
        if len(cells) == 6 and cells[0].isdecimal():
            printed.setdefault(name, tuple(float(cells[i]) for i in (0, 2, 4)))
    for array, *figures in documented()[command]:
        assert printed[array] == tuple(figures)


def test_all_rows_of_the_table_were_found():
    assert [len(rows) for rows in documented().values()] == [3, 2, 1, 4, 2, 1]
