"""The user's own defaults: `config.toml`, which three commands read and the chat keeps up."""

from __future__ import annotations

import argparse
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import platformdirs
import tomlkit
from tomlkit.exceptions import TOMLKitError

from dflash_mlx.cli.options import read_decode_config, read_pair_config
from dflash_mlx.core.config import AUTO, PLAIN, DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError, in_one_line
from dflash_mlx.core.option import check_values, option, require
from dflash_mlx.core.text import read_text
from dflash_mlx.drafters.methods import check_given, choices, family_wanted, own_options
from dflash_mlx.system.files import remove_abandoned, replace_text

ADVISED, TYPED, HERE = "the model's generation_config.json", "the command line", "this chat"
SAMPLED = ("temperature", "top_p", "top_k", "min_p")
_THEMES = ("auto", "dark", "light")
_KINDS = {bool: "true or false", str: "a text", tuple: "a list of texts", dict: "a table of keys"}
_LONG_TEXT = re.compile(r"(\"\"\"|''').*?\1", re.DOTALL)
_OTHERS = {"model": {"drafter", "second_drafter"}, "drafter": {"second_drafter"}}
_OTHERS |= {
    "models_dir": {"model", *_OTHERS["model"]},
    "exact": {"temperature"},
}  # which give way to what was typed


@dataclass(frozen=True)
class FaceConfig:
    """The user's file, and what the chat reads of it; `generate` takes the system prompt, too."""

    config: str | None = option(None, "file with your own defaults, or none (default: config.toml)")
    system: str | None = option(None, "system prompt")
    theme: str = option("auto", "colours; auto follows the terminal", choices=_THEMES)
    adapt: bool = option(
        False, "let the draft model learn from the conversations while nobody types"
    )
    keys: Mapping[str, str] = field(default_factory=dict, metadata={"argparse": {"type": dict}})


class UserConfig:
    """What a file sets, where other settings come from, and what is kept in it.

    file: None for none. values: by setting. origins: where a setting was set that is not at its
    default. problem: why the file could not be read, "" for nothing.
    """

    def __init__(self, name: str | None = "none") -> None:
        """name: None for the usual place. DFlashError with file and line for what is wrong."""
        usual = platformdirs.user_config_path("dflash-chat") / "config.toml"
        self.file = None if name == "none" else Path(os.path.expanduser(name or usual))
        self.problem, self._text = "", ""
        self.values: dict[str, Any] = {}
        try:
            if self.file is not None and (name or os.path.lexists(usual)):
                self._text = _read(self.file)
        except DFlashError as error:
            if name:
                raise
            self.problem = str(error)
        with self.telling():
            self.values = _values(tomlkit.parse(self._text))
        self.origins = dict.fromkeys(self.values, str(self.file))

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Say of an error in the file in which line that is."""
        try:
            yield
        except TOMLKitError as error:
            place = f"line {getattr(error, 'line', 1)} of {self.file}"
            what = f"{place} is not TOML ({in_one_line(error)})"
            raise DFlashError(what, "correct it; texts are written in quotes") from None
        except DFlashError as error:
            place = self._place(error.setting) if error.setting else ""
            raise DFlashError(place + error.what, error.next_step) from None

    def blamed(self, error: DFlashError, model: str | None) -> DFlashError:
        """`error` with the line of the file, where it is about a model that the file names."""
        if not model or model != self.values.get("model") or model not in error.what:
            return error
        return DFlashError(self._place("model") + error.what, error.next_step)

    def _place(self, name: str) -> str:
        text = _LONG_TEXT.sub(lambda found: "\n" * found[0].count("\n"), self._text)
        setting = rf"\s*(\[\s*|keys\s*\.\s*)?[\"']?{re.escape(name)}[\"']?\s*[=.\]]"
        lines = (n for n, line in enumerate(text.splitlines(), 1) if re.match(setting, line))
        return f"line {next(lines, 1)} of {self.file}: "

    def advise(self, config: DecodeConfig, advised: Mapping[str, Any]) -> DecodeConfig:
        """`config` sampling as a model's makers advise, as far as the user chose nothing else.

        advised: their generation_config.json.
        """
        free = [name for name in SAMPLED if self.origins.get(name, ADVISED) == ADVISED]
        new = {n: getattr(SamplingConfig(), n) for n in free if self.origins.pop(n, None)}
        if advised.get("do_sample", "temperature" in advised) and not config.exact:
            for name in free:
                with suppress(DFlashError):
                    new[name] = checked(name, {"temperature": 1.0, **advised}.get(name))
                    self.origins[name] = ADVISED
        return replace(config, sampling=replace(config.sampling, **new))

    def keep(self, changes: Mapping[str, Any]) -> str:
        """Write values, None takes one out; a sentence that says where, "" for nowhere.

        Comments, order, links and rights stay as they are. DFlashError where it cannot be written.
        """
        if self.file is None or self.problem or not changes:
            return ""
        file = Path(os.path.realpath(self.file))
        with self.telling():
            document = tomlkit.parse(_read(file) if os.path.exists(file) else "")
        for name, value in changes.items():
            if value is None:
                document.pop(name, None)
            else:
                document[name] = list(value) if isinstance(value, tuple) else value
        try:
            _values(document)
            if os.path.exists(file) and not file.stat().st_mode & stat.S_IWUSR:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            file.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(file.parent)
            replace_text(file, tomlkit.dumps(document))
        except OSError as error:
            what = f"{file} cannot be written ({error.strerror or error})"
            raise DFlashError(what, "the choice holds until you leave") from None
        except DFlashError as error:
            raise DFlashError(f"{file} stays as it is: {error.what}", error.next_step) from None
        return f"Kept in {self.file}: {', '.join(changes)}."


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """What was typed; in `user` the user's file, and in `kept` what counts of its values.

    What was typed wins: draft models stay with their model, and what does not go with it is left.
    """
    arguments = parser.parse_args(argv)
    typed = {*vars(arguments)}
    user = UserConfig(getattr(arguments, "config", None))
    typed_over = typed.union(*(_OTHERS.get(name, ()) for name in typed))
    kept = {name: value for name, value in user.values.items() if name not in typed_over}
    user.origins |= dict.fromkeys(typed, TYPED)
    if getattr(arguments, "drafter", "") == PLAIN and family_wanted(kept.get("method", AUTO)):
        del kept["method"]
    arguments.user, arguments.kept, arguments.problem = user, kept, user.problem
    while True:
        try:
            method = read_decode_config(arguments, may_sample=True).method
            check_given(read_pair_config(arguments), method)
            return arguments
        except DFlashError as error:
            if error.setting not in kept:
                return arguments  # whoever reads it says so
            del kept[error.setting]


def checked(name: str, value: Any) -> Any:
    """A value as its option gives it; DFlashError for an unknown name and for what cannot be."""
    kinds = (FaceConfig, PairConfig, DecodeConfig, SamplingConfig, own_options())
    known = {f.name: (f, k) for k in kinds for f in fields(k) if "argparse" in f.metadata}
    del known["config"]  # a file names no other one
    if name not in known:
        near = get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.5) or known
        raise DFlashError(f"{name} is not known", f"write {', '.join(near)}", name)
    option, kind = known[name]
    kept = option.default if isinstance(option.default, bool | tuple) else None
    reads = option.metadata["argparse"].get("type", str) if kept is None else type(kept)
    value = tuple(map(str, value)) if isinstance(value, list) else value
    if reads in _KINDS:
        require(isinstance(value, reads), name, value, _KINDS[reads])
        for key, text in value.items() if reads is dict else ():
            require(isinstance(text, str), key, text, "a text")
    else:
        try:
            value = reads(str(value))
        except (ValueError, argparse.ArgumentTypeError):
            require(False, name, value, "a number" if reads is float else "a whole number")
    if name == "method":
        require(value in choices(), name, value, f"one of {', '.join(choices())}")
    check_values(kind(**{name: value}))
    return value


def _values(document: tomlkit.TOMLDocument) -> dict[str, Any]:
    values = {name: checked(name, value) for name, value in document.unwrap().items()}
    read_decode_config(argparse.Namespace(**values), may_sample=True)  # whether they go together
    return values


def _read(file: Path) -> str:
    stays = "it stays as it is; " * os.path.lexists(file)
    return read_text(file, f"{stays}name another file with --config, or none")
