"""What went wrong, or what checks find wrong: sentences with the value, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

_Value = TypeVar("_Value")
_NUMBERS = re.compile(r"\[Errno -?\d+\] |\b[A-Z]\w+Error: | \(char \d+\)")
# Options that are arguments in Python, not those in commands of other programs.
_OPTION = re.compile(
    r"(?<!mlx_lm\.fuse )--(model|drafter-bits|drafter|second-drafter|draft-vocabulary|kv-bits|"
    r"method|system|template|raw)\b(?: (auto|dflash|ngram|none)\b)?"
)


class DFlashError(Exception):
    """A problem the user can act on; `str()` is one sentence for callers of this library.

    `what` names the problem and the offending value; `next_step` says what to do about it; both
    call settings by their options, as in --drafter, which `str()` writes as arguments, drafter=.
    `setting` is the field of a settings class that `what` begins with, "" where it does not.
    Command lines print what they were `told` and exit with code 2; the chat shows it and lives on.
    """

    def __init__(self, what: str, next_step: str, setting: str = "") -> None:
        super().__init__(_OPTION.sub(_as_argument, f"{what}; {next_step}"))
        self.what = what
        self.next_step = next_step
        self.setting = setting

    def told(self, name: Callable[[str], str]) -> str:
        """The sentence, with what its reader knows the setting by: an option, a label on screen."""
        begins = name(self.setting) if self.setting else ""
        return f"{begins}{self.what.removeprefix(self.setting)}; {self.next_step}"


def _as_argument(option: re.Match[str]) -> str:
    return option[1].replace("-", "_") + "=" + (f'"{option[2]}"' if option[2] else "")


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


def in_one_line(error: Exception | str) -> str:
    """What a library says of a problem, without line breaks, numbers of errors and without end."""
    text = _NUMBERS.sub("", " ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} ..."
