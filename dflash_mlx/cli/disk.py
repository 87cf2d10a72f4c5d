"""`dflash-chat models` and `dflash-chat clean`: what is on the disk, without a screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import Any

from tqdm import tqdm

from dflash_mlx.cli.options import Parser
from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import amount
from dflash_mlx.models.downloads import AvailableModel, Download, download_plans, memory_here
from dflash_mlx.models.library import (
    KINDS,
    CacheEntry,
    available_models,
    being_written,
    cache_entries,
    find_entries,
    grouped,
    remove_entry,
)
from dflash_mlx.models.names import DEFAULT_MODEL, registered
from dflash_mlx.system.machine import installed_memory, read_speed

_LOOK = 0.2  # seconds between looks at how far a download is


def models(argv: Sequence[str]) -> None:
    """List models, or say what one takes, or download it; DFlashError where that cannot be done."""
    parser = Parser(
        prog="dflash-chat models",
        description="List what is on this machine and the pairs that could be downloaded. With a "
        "name: the memory that the model needs, what is left to download, and its quantisations.",
    )
    parser.add_argument("name", nargs="?", help="a Hugging Face id, or a folder")
    parser.add_argument(
        "--download",
        action="store_true",
        help="fetch it with its draft model; after Ctrl+C the same command resumes",
    )
    arguments = parser.parse_args(argv)
    if arguments.name is None:
        if arguments.download:
            parser.error("--download needs a name")
        _print(_everything(Path()))
        return
    config = PairConfig(None if arguments.name == DEFAULT_MODEL else arguments.name)
    if arguments.download:
        download(config)
    else:
        _print(_offered(config))


def clean(argv: Sequence[str]) -> None:
    """Say what would be removed; with --yes remove it. DFlashError for a name of nothing."""
    kinds = "; ".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items())
    parser = Parser(
        prog="dflash-chat clean",
        description="Say what would be removed from the disk, and with --yes remove it. Other "
        f"programs share the Hugging Face cache. Kinds are {kinds}.",
    )
    parser.add_argument("what", nargs="*", help="names or kinds, as dflash-chat models lists them")
    parser.add_argument("--yes", action="store_true", help="remove it for good")
    arguments = parser.parse_args(argv)
    kept = cache_entries(Path())
    if not arguments.what:
        _print(_lines(kept))
        print("Nothing was removed. Name what to remove: a name or a kind of this list.")
        return
    found = find_entries(arguments.what, kept)
    if not found:
        print("Nothing of that kind is here.")
        return
    busy = [each for each in found if being_written(each)]
    for name in sorted({each.name for each in busy}):
        print(f"{name} is being downloaded, or was a moment ago, so it stays.")
    if not (found := [each for each in found if each not in busy]):
        return
    _print(_lines(found))
    freed = amount(sum(each.size for each in found))
    if not arguments.yes:
        print(f"Nothing was removed. Add --yes to delete them ({freed}).")
    else:
        for each in found:
            remove_entry(each)
        print(f"Removed {freed}.")


def download(config: PairConfig) -> None:
    """Fetch what is missing, with a bar on stderr; raises what the download failed with."""
    name, under_way = config.model or DEFAULT_MODEL, Download(config)
    try:
        with tqdm(desc=name, unit="B", unit_scale=True, disable=None) as bar:
            while not under_way.ended.wait(_LOOK):
                _show(bar, under_way)
            _show(bar, under_way)
    finally:
        under_way.stop()
    if under_way.error is not None:
        raise under_way.error
    print(f"{name} is here, as dflash-chat --model {name} and /model {name} load it.")


def _show(bar: Any, under_way: Download) -> None:
    bar.total, bar.n = under_way.total or None, under_way.done
    bar.refresh()


def _print(lines: Iterator[str]) -> None:
    """Each as it comes: a hub may take its time for the next."""
    for line in lines:
        print(line, flush=True)


def _everything(here: Path) -> Iterator[str]:
    installed, speed = installed_memory(), read_speed()
    yield memory_here()
    groups, best = grouped(available_models(here), installed, speed)
    marked, (*shown, large) = False, groups
    wide = max(len(model.name) for group in shown for model in groups[group])
    for group in shown:
        if groups[group]:
            yield f"\n{group:<{wide + 2}}  {'download':>8}  {'memory':>8}  {'drafts':<13}   tok/s"
        for model in groups[group]:
            yield (row := _row(model, wide, installed, speed)) + "  recommended" * (model is best)
            marked |= "!" in row
    if groups[large]:
        names = ", ".join(model.name for model in groups[large])
        yield "\n" + fill(f"{large}: {names}", 100, subsequent_indent="  ", break_on_hyphens=False)
    yield "\nTo download: 4 bits a weight. tok/s: without drafts." + " !: too large." * marked
    yield "dflash-chat models NAME shows details and quantisations; --download fetches it.\n"
    yield from _lines(cache_entries(here))


def _row(model: AvailableModel, wide: int, installed: int, speed: float) -> str:
    download, memory, drafts, plain = model.cells(installed, speed)
    return f"  {model.name:<{wide}}  {download}  {memory}  {drafts:<11}  {plain}".rstrip()


def _lines(kept: Sequence[CacheEntry]) -> Iterator[str]:
    """One for each name of a kind, and their sum."""
    named: dict[tuple[str, str], list[CacheEntry]] = {}
    for each in kept:
        named.setdefault((each.kind, each.name), []).append(each)
    width = max((len(name) for _, name in named), default=0)
    for (kind, name), some in named.items():
        day = datetime.fromtimestamp(max(each.changed for each in some)).date()
        path = some[0].path if len(some) == 1 else some[0].path.parent
        place = "" if str(path) == name else _short(path)
        place += f" ({len(some)} files)" * (len(some) > 1)
        place += " (being downloaded)" * any(map(being_written, some))
        size = amount(sum(each.size for each in some))
        yield f"{kind:<11}  {size:>9}  {day}  {name:<{width}}  {place}".rstrip()
    total = sum(each.size for each in kept)
    yield f"{'all':<11}  {amount(total):>9}" if kept else "Nothing is here yet."


def _short(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _offered(config: PairConfig) -> Iterator[str]:
    offers = download_plans(config)
    first, second = next(offers), next(offers, None)
    if first.problem and second is None:
        raise DFlashError(*first.problem.rsplit("; ", 1))
    yield memory_here()
    if config.model is not None and (pair := registered(config.model)) is not None:
        mark = "" if pair.verified else ", never tried with this program"
        yield f"draft model {pair.drafter}{mark}" + f"; others: {pair.more}" * bool(pair.more)
    for offer in chain(filter(None, (first, second)), offers):
        yield f"{offer.name}  {offer.terms(installed_memory())}"
