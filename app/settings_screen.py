"""All settings of decoding and sampling, made from the settings classes themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, replace
from typing import Any

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Input, Select, Static, Switch

from dflash_chat.fields import TextField
from dflash_chat.labels import DRAFTS, GROUPS, OTHER, label_of
from dflash_chat.problems import describe
from dflash_chat.screens import Dialog
from dflash_mlx.client import (
    DecodeConfig,
    DFlashError,
    Given,
    SamplingConfig,
    check_given,
    checked,
    method_choices,
    own_options,
    values_given,
)

_FOR_OPTIONS = re.compile(r"; may be repeated$| \(default: ([^)]*)\)$")  # in a help text


def settings_of(config: Any) -> Iterator[Field[Any]]:
    """The fields of a settings object that have a help text."""
    return (f for f in fields(config) if "help" in f.metadata)


def shown(value: Any) -> str:
    """A value as it is typed; several texts are separated by commas."""
    if value is None:
        return ""
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def parse(field: Field[Any], typed: str) -> Any:
    """What was typed for `field`; DFlashError when it is not of the field's type."""
    typed = typed.strip()
    if field.default == ():
        return tuple(part.strip() for part in typed.split(",") if part.strip())
    return checked(field.name, typed) if typed else field.default


def changes(before: DecodeConfig, after: DecodeConfig) -> dict[str, Any]:
    """The settings that differ, as they are after; None for an option that is gone."""
    old, new = (
        {f.name: getattr(c, f.name) for c in (config, config.sampling) for f in settings_of(c)}
        | values_given(config.options)
        for config in (before, after)
    )
    return {n: new.get(n) for n in old | new if old.get(n) != new.get(n) and n != "recalibrate"}


class SettingsScreen(Dialog[DecodeConfig | None]):
    """Gives the changed settings, None when nothing is to change."""

    BINDINGS = [("escape", "leave", "Leave"), ("ctrl+s", "save", "Save")]

    def __init__(self, config: DecodeConfig, origins: Mapping[str, str]) -> None:
        super().__init__()
        self._config, self._origins = config, origins
        both = (config, config.sampling)
        self._fields = {f.name: (f, getattr(c, f.name)) for c in both for f in settings_of(c)}
        own = values_given(config.options)
        self._own = {f.name: f for f in settings_of(own_options())}
        self._fields |= {n: (f, own.get(n, f.default)) for n, f in self._own.items()}

    def compose(self) -> ComposeResult:
        with self.frame("Settings", "Tab next, Enter or Ctrl+S applies, Esc leaves"):
            yield self.problem_line()
            with VerticalScroll(can_focus=False):
                for title, names in self._groups():
                    yield Static(title, classes="group", markup=False)
                    for name in names:
                        field, value = self._fields[name]
                        origin = f", from {self._origins[name]}" if name in self._origins else ""
                        help = _FOR_OPTIONS.sub("", field.metadata["help"])
                        yield Static(label_of(name) + origin, classes="label", markup=False)
                        yield Static(help, classes="help", markup=False)
                        yield _control(field, value)

    def _groups(self) -> Iterator[tuple[str, list[str]]]:
        """Titles and names in the order of the screen; what nobody sorted comes last."""
        left = dict.fromkeys(self._fields)
        for title, known in GROUPS.items():
            names = [*known, *self._own] if title == DRAFTS else [*known]
            for name in names:
                del left[name]
            yield title, [*names, *(left if title == OTHER else ())]

    def on_mount(self) -> None:
        """The first control has the focus, and its label must be seen, too."""
        self.call_after_refresh(self.query_one(VerticalScroll).scroll_home, animate=False)

    def on_input_submitted(self) -> None:
        self.action_save()

    def action_save(self) -> None:
        try:
            sampling = SamplingConfig(**self._values(self._config.sampling))
            values = self._values(self._config)
            own = {name: self._value(field) for name, field in self._own.items()}
            given = {n: v for n, v in own.items() if v != self._own[n].default}
            options = Given.of(**given) if given else None
            config = replace(self._config, sampling=sampling, options=options, **values)
            check_given(config)
            self.dismiss(config)
        except DFlashError as error:
            self.say(describe(error))

    def _values(self, config: Any) -> dict[str, Any]:
        return {f.name: self._value(f) for f in settings_of(config)}

    def _value(self, field: Field[Any]) -> Any:
        control = self.query_one(f"#set-{field.name}")
        if isinstance(control, Input):
            return parse(field, control.value)
        assert isinstance(control, Select | Switch)
        return control.value


def _control(field: Field[Any], value: Any) -> Input | Select[str] | Switch:
    keywords, name = field.metadata["argparse"], f"set-{field.name}"
    if isinstance(field.default, bool):
        return Switch(value, id=name)
    if field.name == "method" or "choices" in keywords:
        offered = method_choices() if field.name == "method" else keywords["choices"]
        choices = [(choice, choice) for choice in offered]
        return Select(choices, value=value, allow_blank=False, id=name, compact=True)
    usual = _FOR_OPTIONS.search(field.metadata["help"])
    empty = (usual and usual[1]) or "not set"
    return TextField(shown(value), placeholder=empty, id=name, compact=True)
