"""The table of methods: what `--method`, `auto`, benchmarks and the chat know of drafters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

from dflash_mlx.core.config import AUTO, DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters import (
    best_first,
    block_diffusion,
    dual_diffusion,
    ngram,
    none,
    resample,
)
from dflash_mlx.drafters.formats import FileFormat
from dflash_mlx.drafters.method import Method, TokenSource, check_block_size
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.pair import Means, Pair

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        none.METHOD,
        block_diffusion.METHOD,
        best_first.METHOD,
        dual_diffusion.METHOD,
        ngram.METHOD,
        resample.METHOD,
    )
}


def choices() -> tuple[str, ...]:
    """What `--method` takes."""
    return (AUTO, *(method.name for method in METHODS.values() if not method.is_control))


def find_method(name: str) -> Method:
    """The method of this name; DFlashError where there is none."""
    if name not in METHODS:
        raise DFlashError(f"method is {name!r}", f"choose one of {', '.join(choices())}")
    return METHODS[name]


def sources() -> tuple[TokenSource, ...]:
    """Of all methods, each once, in the order of the method that has the most."""
    most_first = sorted(METHODS.values(), key=lambda method: -len(method.sources))
    return tuple(dict.fromkeys(s for method in most_first for s in method.sources))


def formats() -> tuple[FileFormat, ...]:
    """The files of all families of draft models, each once."""
    known = (method.files for method in METHODS.values())
    return tuple(dict.fromkeys(each for each in known if each is not None))


def format_of(raw: Mapping[str, Any]) -> FileFormat | None:
    """The family that a config.json is of; None for a target's."""
    return next((each for each in formats() if each.recognises(raw)), None)


def family_of(files: FileFormat) -> str | None:
    """The family whose folders are read so, None where no method runs it."""
    return next((m.family for m in METHODS.values() if m.files is files), None)


def takers(setting: str) -> tuple[str, ...]:
    """The methods that a setting belongs to, () where it holds for every method."""
    return tuple(name for name, method in METHODS.items() if setting in method.settings)


def given(config: DecodeConfig) -> tuple[str, ...]:
    """The settings of single methods that are not at their defaults."""
    defaults = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    mine = {setting for method in METHODS.values() for setting in method.settings}
    return tuple(n for n, value in defaults.items() if n in mine and getattr(config, n) != value)


def check_given(config: DecodeConfig) -> None:
    """Raise DFlashError for a setting that the method which was named cannot follow.

    Switches may be off, and drafts be matched, with any method.
    """
    if config.method == AUTO:
        return
    method = find_method(config.method)
    for setting in given(config):
        value = getattr(config, setting)
        if setting not in method.settings and not isinstance(value, bool) and value != "match":
            raise DFlashError(
                f"{setting} is {value}, but {config.method} does not have it",
                f"leave it out, or choose one that does: {', '.join(_offered(setting))}",
            )


def _offered(setting: str) -> list[str]:
    """The methods of `--method` that a setting belongs to."""
    return [name for name in takers(setting) if not METHODS[name].is_control]


def settle(config: DecodeConfig, means: Means) -> DecodeConfig:
    """`config` with a method in place of `auto`."""
    method = _auto(config, means) if config.method == AUTO else find_method(config.method)
    return replace(config, method=method.name)


def _auto(config: DecodeConfig, means: Means) -> Method:
    """What the pair serves; of these, the one that a given setting belongs to; then the advice.

    Settings of several methods choose none, and one whose method cannot be had changes nothing.
    """
    serving = [method for method in METHODS.values() if _serves(method, means)]
    if config.acceptance == "reject" and config.sampling.temperature > 0:
        serving = [method for method in serving if method.draws] or serving
    for setting in given(config):
        owner, *others = _offered(setting)
        if not others and setting != "acceptance":
            serving = [method for method in serving if method.name == owner] or serving
    serving.sort(key=lambda method: -method.preference)
    advised = [method for method in serving if method.name == means.advice.method]
    full = [method for method in serving if method.best_with <= means.drafters]
    return (advised or full or serving)[0]


def _serves(method: Method, means: Means) -> bool:
    """Whether `auto` may be this method with such a pair."""
    fits = means.family in (None, method.family)
    drafted = not method.family or (means.drafters > 0 and fits)
    return method.preference > 0 and drafted and (means.trees or not method.needs_trees)


def serving(means: Means) -> tuple[str, ...]:
    """The methods that draft and that such a pair serves."""
    return tuple(name for name, method in METHODS.items() if _serves(method, means))


def why_auto(config: DecodeConfig, means: Means) -> str:
    """Which settings chose what `auto` is, "" where they did not."""
    if config.method != AUTO or not (named := given(config)):
        return ""
    plain = DecodeConfig(sampling=config.sampling)
    chosen, usual = _auto(config, means).name, _auto(plain, means).name
    return "" if chosen == usual else f"auto is {chosen} here, for {', '.join(named)}"


def needs_drafter(name: str) -> bool:
    """Whether a method, `auto` excepted, runs draft models."""
    return name != AUTO and bool(find_method(name).family)


def wants_two(name: str) -> bool:
    """Whether a method, `auto` excepted, is best with a second draft model."""
    return name != AUTO and find_method(name).best_with > 1


def draws_drafts(config: DecodeConfig) -> bool:
    """Whether drafts are drawn, with a method in place of `auto`."""
    return find_method(config.method).draws and config.draws_drafts


def check_uses(
    uses: Sequence[DecodeConfig], block_sizes: Sequence[int], means: Means, missing: str
) -> None:
    """Raise DFlashError for uses that need a draft model, or other blocks than there are.

    block_sizes: of the pair's draft models. missing: why there is none.
    """
    for use in uses:
        if needs_drafter(use.method) and not block_sizes:
            raise DFlashError(missing, "name one with --drafter, or use --method none")
        method = find_method(settle(use, means).method)
        for most in block_sizes[: method.best_with]:
            check_block_size(use.block_size, most)


def make_drafter(pair: Pair, config: DecodeConfig) -> Drafter:
    """The drafter of `config.method`; DFlashError when the pair has none that fits."""
    config = settle(config, pair.means)
    method = find_method(config.method)
    if method.needs_trees:
        pair.target.check_trees()
    if method.family and (family := pair.require_drafter().family) != method.family:
        raise DFlashError(
            f"{method.name} needs a drafter of the {method.family} family, but "
            f"{pair.drafter_name or 'this one'} is of {family}",
            "use --method auto, or name another with --drafter",
        )
    return method.make(pair, config)
