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
from dflash_mlx.drafters.method import Method, Source, check_block_size
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


def sources() -> tuple[Source, ...]:
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


def takers(setting: str) -> tuple[str, ...]:
    """The methods that a setting belongs to, () where it holds for every method."""
    return tuple(name for name, method in METHODS.items() if setting in method.settings)


def given(config: DecodeConfig) -> tuple[str, ...]:
    """The settings of single methods that are not at their defaults."""
    defaults = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    mine = {setting for method in METHODS.values() for setting in method.settings}
    return tuple(n for n, value in defaults.items() if n in mine and getattr(config, n) != value)


def check_given(config: DecodeConfig) -> None:
    """Raise DFlashError for a setting that belongs to other methods than the one that was named."""
    if config.method == AUTO:
        return
    method = find_method(config.method)
    for setting in given(config):
        if setting not in method.settings:
            owners = ", ".join(takers(setting))
            raise DFlashError(
                f"{setting} is {getattr(config, setting)}, but {config.method} does not have it",
                f"leave it out, or choose a method that does: {owners}",
            )


def settle(config: DecodeConfig, means: Means) -> DecodeConfig:
    """`config` with a method in place of `auto`, and with the block that pays, if it is known."""
    name = _auto(config, means).name if config.method == AUTO else find_method(config.method).name
    config = replace(config, method=name)
    if name == "dflash" and config.block_size is None:
        return replace(config, block_size=means.advice.block_size)
    return config


def _auto(config: DecodeConfig, means: Means) -> Method:
    """What the pair serves; of these, what takes the settings that were given; then the advice.

    A setting that none of them takes changes nothing.
    """
    serving = [method for method in METHODS.values() if _serves(method, means)]
    if config.acceptance == "reject" and config.sampling.temperature > 0:
        serving = [method for method in serving if method.draws] or serving
    for setting in set(given(config)) - {"acceptance"}:
        serving = [method for method in serving if setting in method.settings] or serving
    serving.sort(key=lambda method: -method.preference)
    advised = [method for method in serving if method.name == means.advice.method]
    full = [method for method in serving if method.best_with <= means.drafters]
    return (advised or full or serving)[0]


def _serves(method: Method, means: Means) -> bool:
    """Whether `auto` may be this method with such a pair."""
    drafted = not method.family or (means.drafters > 0 and method.family == means.family)
    return method.preference > 0 and drafted and (means.trees or not method.needs_trees)


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
