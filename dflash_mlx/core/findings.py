"""What checks find wrong with a model folder: sentences with file, field and both values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from dflash_mlx.core.errors import DFlashError

Severity = Literal["error", "warning", "note"]
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    severity: an error keeps the model from being used, a warning does not, a note is worth
    knowing. what, next_step: a sentence's two halves. file, field: where it is; found, expected:
    both values, "" where there is no such thing.
    """

    severity: Severity
    what: str
    next_step: str
    file: str = ""
    field: str = ""
    found: str = ""
    expected: str = ""

    def __str__(self) -> str:
        return f"{self.what}; {self.next_step}"


class Refused(DFlashError):
    """A finding as the error that it is."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.what, finding.next_step)
        self.finding = finding


@dataclass(frozen=True)
class Checked:
    """The outcome of a check, the gravest problems of a kind first to be met."""

    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that keep the model from being used."""
        return errors(self.findings)

    def raise_first(self) -> None:
        """Raise the first error as a DFlashError, if there is one."""
        for finding in self.errors:
            raise Refused(finding)


def errors(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those that keep a model from being used."""
    return tuple(finding for finding in findings if finding.severity == "error")


class Collector:
    """Findings as they come up, each once."""

    def __init__(self) -> None:
        self._findings: dict[Finding, None] = {}

    def add(self, findings: Iterable[Finding]) -> None:
        """Keep these; where they end in an exception, those before it."""
        for finding in findings:
            self._findings[finding] = None

    def attempt(self, read: Callable[..., _Value], *arguments: Any) -> _Value | None:
        """What `read` returns, or None where it refuses, which is a finding."""
        try:
            return read(*arguments)
        except Refused as refusal:
            self.add([refusal.finding])
        except DFlashError as error:
            self.add([Finding("error", error.what, error.next_step)])
        return None

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The errors so far."""
        return errors(self._findings)

    def result(self) -> tuple[Finding, ...]:
        """All that were found."""
        return tuple(self._findings)


def in_one_line(error: Exception) -> str:
    """What a library says of a problem, without line breaks and not without end."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} ..."
