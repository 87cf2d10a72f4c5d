"""`dflash-chat models` and `dflash-chat clean`: what is on the disk, without a screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflash_mlx.cli.options import Parser
from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.text import amount
from dflash_mlx.models.downloads import Download, download_plans, memory_needed
from dflash_mlx.models.library import (
    KINDS,
    CacheEntry,
    available_models,
    being_written,
    cache_entries,
    find_entries,
    remove_entry,
)
from dflash_mlx.models.names import DEFAULT_MODEL, registered
from dflash_mlx.system.machine import available_memory

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
    config = PairConfig(arguments.name)
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
    kept, there = cache_entries(here), available_memory()
    yield from _lines(kept)
    yield ""
    yield f"to download (sizes computed for 4 bits a weight; {amount(there)} of memory available):"
    for model in available_models(here):
        if not model.here:
            needs = memory_needed(model.needs, there, "about ")
            about = f"about {amount(model.download):>9}, {needs}" if model.needs else ""
            mark = "" if model.verified else "  not verified"
            yield f"  {model.name:<36}  {about}{mark}".rstrip()
    yield "not verified: there is a draft model, but this program was never tried with its files."
    yield "dflash-chat models NAME shows details and quantisations; --download fetches it."


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
    there = available_memory()
    yield f"{amount(there)} of memory available"
    if config.model is not None and (pair := registered(config.model)) is not None:
        mark = "" if pair.verified else ", not verified"
        yield f"draft model {pair.drafter}{mark}" + f"; others: {pair.more}" * bool(pair.more)
    for offer in download_plans(config):
        yield f"{offer.name}  {offer.terms(there)}"
