"""What went wrong, or what checks find wrong: sentences with the value, and what to do next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

_Value = TypeVar("_Value")


class DFlashError(Exception):
    """A problem the user can act on; `str()` is one sentence for the screen.

    `what` names the problem and the offending value; `next_step` says what to do about it.
    `setting` is the field of a settings class that `what` begins with, "" where it does not.
    Command lines print it and exit with code 2; the chat shows it and stays usable.
    """

    def __init__(self, what: str, next_step: str, setting: str = "") -> None:
        super().__init__(f"{what}; {next_step}")
        self.what = what
        self.next_step = next_step
        self.setting = setting

    def told(self, name: Callable[[str], str]) -> str:
        """The sentence, with what its reader knows the setting by: an option, a label on screen."""
        if not self.setting:
            return str(self)
        return f"{name(self.setting)}{self.what.removeprefix(self.setting)}; {self.next_step}"


@dataclass(frozen=True)
class Finding:
    """One thing that a check found, a sentence's two halves."""

    severity: Literal["error", "warning", "note"]  # errors alone keep a model from being used
    what: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.what}; {self.next_step}"


@dataclass(frozen=True)
class Checked:
    """The outcome of a check."""

    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def raise_first(self) -> None:
        """Raise DFlashError for the first error, if there is one."""
        for finding in self.errors:
            raise DFlashError(finding.what, finding.next_step)


class Collector:
    """Findings as they come up, each once."""

    def __init__(self) -> None:
        self._found: dict[Finding, None] = {}

    def add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._found[finding] = None

    def attempt(self, read: Callable[..., _Value], *arguments: Any) -> _Value | None:
        """What `read` returns, or None where it refuses, which is a finding."""
        try:
            return read(*arguments)
        except DFlashError as error:
            self.add([Finding("error", error.what, error.next_step)])
        return None

    @property
    def errors(self) -> tuple[Finding, ...]:
        return Checked(self.result()).errors

    def result(self) -> tuple[Finding, ...]:
        return tuple(self._found)


def in_one_line(error: Exception) -> str:
    """What a library says of a problem, without line breaks and not without end."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} ..."
