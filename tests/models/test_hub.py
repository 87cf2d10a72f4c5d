"""Models on a hub: checked by their heads, offered with what they take, fetched only if they fit.

The hub is on this machine.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import save_file

from dflash_mlx import load
from dflash_mlx.client import DecodeConfig, DFlashError, Download, PairConfig, download_plans
from dflash_mlx.convert.__main__ import main as convert
from dflash_mlx.convert.plan import find_part
from dflash_mlx.models import downloads, library
from dflash_mlx.models.check import check_target
from dflash_mlx.models.load import check_named, load_pair
from dflash_mlx.models.names import find_names, whole_copy
from dflash_mlx.models.source import INDEX, Source, is_whole
from dflash_mlx.session.session import generate
from support.drafter_formats import write_shards
from support.hub_server import Hub, serve, use_hub
from support.models import Damage, ask_for_code, edit_config, write_drafter, write_model
from support.reference_dflash import random_drafter, tiny_drafter_config

QUANTISED = ("mlx-community/model-8bit", "mlx-community/model-4bit")
NAMED_ALIKE = ("mlx-community/model-Instruct-4bit", "someone/model-4bit")
PAIR = PairConfig("owner/model", "owner/drafter")
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(model: Path, tmp_path: Path) -> Iterator[Hub]:
    """With targets and drafters, and an empty cache."""
    folders = {
        **dict.fromkeys(("owner/model", *QUANTISED, *NAMED_ALIKE), model),
        "owner/drafter": write_drafter(tmp_path / "drafter"),
        "owner/wide": write_drafter(tmp_path / "wide", hidden_size=128),
        "z-lab/Qwen3-4B-DFlash-b16": write_drafter(tmp_path / "other", hidden_size=128),
        "Qwen/Qwen3-4B": write_model(tmp_path / "known"),
    }
    with serve(folders, tmp_path / "cache") as served:
        yield served


def weights_fetched(hub: Hub) -> int:
    return hub.fetched().count(None)


def finish(download: Download) -> Download:
    assert download.ended.wait(60)
    return download


# Heads


def test_a_repository_is_checked_by_its_heads_and_no_weight_is_fetched(model, hub):
    report = check_named(PAIR)
    assert report.findings == ()
    assert report.target.weights == check_target(model).weights
    assert set(hub.fetched()) == {"bytes=0-100000"}


def test_a_download_says_of_what_and_how_much(hub, monkeypatch, capsys):
    monkeypatch.setenv("TQDM_POSITION", "-1")  # bars, though this is no terminal
    Source("owner/model", None, "model").fetch()
    said = capsys.readouterr().err
    assert re.search(r"downloading owner/model, [\d.]+[kM]?B of [\d.]+[kM]?B: +\d+%\|", said), said


@pytest.mark.parametrize("option", ["model", "drafter"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("owner/none", "'owner/none' is neither a folder nor a public model"),
        ("owner/wide", "owner/wide is open only to those who have accepted its licence"),
        ("owner/drafter", "owner/drafter was not found here, and .* cannot be reached"),
    ],
)
def test_a_name_that_cannot_be_had_is_one_sentence(model, hub, monkeypatch, option, name, value):
    hub.gated = "owner/wide"
    if "reached" in value:
        use_hub(monkeypatch)
    with pytest.raises(DFlashError, match=value) as failure:
        load(**{"model": str(model), option: name})
    assert f"--{option}" in failure.value.next_step
    assert "\n" not in str(failure.value)
    (offer,) = download_plans(PairConfig(name))
    assert name in offer.problem and not offer.here
    with pytest.raises(DFlashError, match=value):
        convert([name, str(model.parent / "dst")])


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("gone (Got: ConnectError: [Errno -2] Name or service not known)", "Name or service not k"),
        ("Got: ConnectError: no route", "no route"),
        ("no snapshot. To go online, set 'HF_HUB_OFFLINE=0' as variable.", "HF_HUB_OFFLINE is set"),
    ],
)
def test_what_the_client_says_is_told_without_its_numbers_and_classes(said, reason):
    what = Source("owner/model")._refused(LocalEntryNotFoundError(said)).what
    assert f"cannot be reached ({reason}" in what and what.count(")") == 1


def with_head(head: bytes) -> Callable[[bytes], bytes]:
    return lambda sound: len(head).to_bytes(8, "little") + head + bytes(16)


HEADS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another type": (lambda sound: sound.replace(b'"F32"', b'"I64"', 1), "24832 bytes"),
    "a type that MLX lacks": (lambda sound: sound.replace(b'"F32"', b'"F64"', 1), "'F64'"),
    "truncated": (lambda sound: sound[:100_000], "is truncated"),
    "empty": (lambda sound: b"", ""),
    "a large size": (lambda sound: (2**63).to_bytes(8, "little") + sound[8:], "too big"),
    "no JSON": (with_head(b"{"), "not json"),
    "a list": (with_head(b"[]"), ""),
    "a shape in words": (
        with_head(b'{"a": {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}}'),
        "",
    ),
    "no offsets": (
        with_head(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": []}}'),
        "",
    ),
}


@pytest.mark.parametrize("case", HEADS)
def test_a_damaged_head_on_the_hub_is_refused_before_its_file_is_fetched(case, model, hub):
    damage, value = HEADS[case]
    file = model / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    (found,) = check_target(Source("owner/model")).errors
    assert found.what.startswith("owner/model/model.safetensors is damaged") and value in found.what
    assert weights_fetched(hub) == 0


def test_a_long_head_on_the_hub_takes_a_second_request_for_its_rest(model, hub):
    names = [f"{i:0100}" for i in range(1000)]
    save_file({name: np.zeros(1, np.float32) for name in names}, model / "model.safetensors")
    assert sorted(Source("owner/model").header("model.safetensors", "")) == names
    first, second = [r for _, file, r in hub.requests if r]
    assert (first, second[:9]) == ("bytes=0-100000", "bytes=8-1")


# What is offered


def test_a_model_on_the_hub_is_offered_with_its_size_and_its_quantisations(hub):
    found = list(download_plans(PAIR))
    assert [offer.name for offer in found] == ["owner/model", QUANTISED[1], QUANTISED[0]]
    assert [offer.config.drafter for offer in found] == ["owner/drafter"] * 3
    files = [
        f for part in ("model", "drafter") for f in hub.repositories[f"owner/{part}"].iterdir()
    ]
    assert found[0].download == sum(file.stat().st_size for file in files)
    assert found[0].needs > 0
    assert not any(offer.here or offer.problem for offer in found)
    assert weights_fetched(hub) == 0


def test_the_built_in_model_is_offered_alone_whether_it_was_fetched_or_not(tmp_path, monkeypatch):
    monkeypatch.setattr(downloads.default_model, "kept_at", lambda: tmp_path / "default.gguf")
    (offer,) = download_plans(PairConfig())
    assert offer.needs > 0 and offer.download == downloads.default_model.SIZE
    (tmp_path / "default.gguf").write_text("")
    (offer,) = download_plans(PairConfig())
    assert offer.here
    with pytest.raises(DFlashError, match="nowhere/at/all"):
        list(download_plans(PairConfig("nowhere/at/all")))


# What is fetched


def test_a_pair_on_the_hub_is_fetched_without_files_that_could_run_and_decodes(model, hub):
    (model / "original").mkdir()
    unwanted = ["modeling.py", "pytorch_model.bin", "model.pt", "original/model.safetensors"]
    for name in unwanted:
        (model / name).write_bytes(b"never read")
    pair = load("owner/model", "owner/drafter")
    assert (pair.target.name, pair.drafter_name) == ("owner/model", "owner/drafter")
    answer = generate(pair, "hello", DecodeConfig("dflash", max_tokens=5))
    assert answer.statistics.method == "dflash"
    assert weights_fetched(hub) == 2
    assert len(load("owner/model", "owner/drafter").drafters) == 1
    assert weights_fetched(hub) == 2
    assert {file for _, file, _ in hub.requests}.isdisjoint(unwanted)


def test_a_download_fetches_model_and_drafter_and_counts_their_bytes(hub):
    expected = next(download_plans(PAIR)).download
    download = finish(Download(PAIR))
    assert download.finished and download.error is None
    assert 0 < download.total <= expected, "configurations were read before, to check the pair"
    assert download.done == download.total
    assert whole_copy("owner/model") and whole_copy("owner/drafter", "drafter")
    assert [offer.here for offer in download_plans(PAIR)] == [True]
    assert [offer.here for offer in download_plans(PAIR, everything=True)] == [True, False, False]
    local = PairConfig(*(str(hub.repositories[name]) for name in ("owner/model", "owner/drafter")))
    assert [offer.here for offer in download_plans(local)] == [True]


def test_a_stopped_download_goes_on_with_the_files_that_are_missing(model, hub, tmp_path):
    hub.held[WEIGHTS] = threading.Event()
    config = PairConfig("owner/model")
    download = Download(config)
    assert hub.reached.wait(60)
    download.stop()
    hub.held.pop(WEIGHTS).set()
    finish(download)
    assert download.stopped and not download.finished and download.error is None
    assert whole_copy("owner/model") is None
    assert list((tmp_path / "cache").rglob("*.incomplete")) == [], "nothing half-written stays"
    assert hub.fetched("tokenizer.json") == [None]
    again = finish(Download(config))
    assert again.finished
    assert again.total == (model / WEIGHTS).stat().st_size
    assert hub.fetched("tokenizer.json") == [None]
    assert whole_copy("owner/model") is not None


def test_a_download_that_fails_or_has_no_room_keeps_the_reason(hub, monkeypatch):
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 1000))
        full = finish(Download(PAIR))
    monkeypatch.setattr(downloads, "check_space", lambda *_: hub.repositories.clear())
    gone = finish(Download(PairConfig("owner/model")))
    for download, said in ((full, "1.0 kB free"), (gone, "owner/model")):
        assert isinstance(download.error, DFlashError) and said in str(download.error)
    assert weights_fetched(hub) == 0


def pickle_it(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def set_to(**changes: Any) -> Damage:
    return lambda folder: edit_config(folder, **changes)


# What is damaged and how, the drafter that is asked for, and what is said
REFUSED: dict[str, tuple[str, Damage, str | None, str]] = {
    "a drafter of another target": ("drafter", set_to(), "owner/wide", "hidden_size 128"),
    "a tensor too much": ("drafter", set_to(num_hidden_layers=1), "owner/drafter", "layers.1"),
    "an unknown family": ("model", set_to(model_type="nonesuch"), None, "nonesuch"),
    "code": ("model", ask_for_code, None, "owner/model .*'model.py'"),
    "pickled": ("model", pickle_it, None, "owner/model .*pytorch_model.bin can run code"),
    "no config": ("model", lambda f: (f / "config.json").unlink(), None, "has no config.json"),
    "no tokenizer": ("model", lambda f: (f / "tokenizer.json").unlink(), None, "tokenizer.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_serve_is_refused_before_any_weight_is_fetched(hub, tmp_path, case):
    damaged, damage, drafter, value = REFUSED[case]
    damage(hub.repositories[f"owner/{damaged}"])
    for more in [] if drafter else ([], ["--check"]):
        with pytest.raises(DFlashError, match=value):
            convert(["owner/model", str(tmp_path / "dst"), *more])
    assert not (tmp_path / "dst").exists()
    if case != "no tokenizer":  # which is seen when it is loaded
        with pytest.raises(DFlashError, match=value):
            load("owner/model", drafter)
        download = finish(Download(PairConfig("owner/model", drafter)))
        assert not download.finished and re.search(value, str(download.error))
    assert weights_fetched(hub) == 0


def test_what_was_fetched_is_checked_again(hub, tmp_path, monkeypatch):
    arrived = write_drafter(tmp_path / "arrived")
    (arrived / "model.safetensors").write_bytes(b"no weights")
    monkeypatch.setattr(Source, "fetch", lambda source: Source.of(arrived))
    with pytest.raises(DFlashError, match="arrived.* is damaged"):
        load("owner/model", "owner/drafter")


def test_a_drafter_that_is_done_without_is_not_fetched(hub):
    pair = load_pair(PairConfig("Qwen/Qwen3-4B"), DecodeConfig())
    assert "hidden_size 128" in pair.undrafted
    assert weights_fetched(hub) == 1


# What an interrupted download left unfinished is not taken for a whole model

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def into_shards(folder: Path) -> Path:
    """A target in two files, with what load does not fetch or read beside them."""
    stored: Any = mx.load(str(folder / "model.safetensors"))
    names = sorted(stored)
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    for file, part in zip(SHARDS, (names[:10], names[10:]), strict=True):
        mx.save_safetensors(str(folder / file), {name: stored[name] for name in part})
    (folder / "original").mkdir()
    shutil.copy(folder / SHARDS[0], folder / "original" / "model.safetensors")
    return folder


@pytest.fixture
def sharded(model: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(downloads, "on_cpu", lambda: False)
    return into_shards(model)


def whole(folder: Path) -> bool:
    return is_whole(Source.of(folder, "drafter"))


def listed_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(library, "cache_folder", lambda: Path(constants.HF_HUB_CACHE))
    return [found.name for found in library.cached_folders()]


def test_a_folder_is_whole_with_all_shards_and_all_that_its_index_names(tmp_path):
    raw = tiny_drafter_config()
    folder = write_shards(tmp_path / "a", raw, random_drafter(raw))
    assert whole(folder)
    for file in [file for file in folder.iterdir() if file.name != INDEX]:
        contents = file.read_bytes()
        file.unlink()
        assert not whole(folder), file.name
        file.write_bytes(contents)
    (folder / INDEX).write_text("[")
    assert not whole(folder)
    assert not whole(tmp_path / "nowhere")


@pytest.mark.parametrize("files", [["config.json"], ["config.json", SHARDS[0]], SHARDS])
def test_half_a_download_is_no_model_anywhere(sharded, tmp_path, monkeypatch, files):
    for file in files:
        hf_hub_download("owner/model", file)
    stored = sum((sharded / file).stat().st_size for file in SHARDS)
    assert listed_in_the_cache(monkeypatch) == []
    assert downloads.needed_by(find_names(PairConfig("owner/model"))) == int(stored * 1.15)
    assert downloads.needed_by(find_names(PairConfig("owner/none"))) == 0
    with monkeypatch.context() as patches:
        use_hub(patches)
        with pytest.raises(DFlashError):
            find_part("owner/model")
    report = check_named(PairConfig("owner/model"))
    assert not report.errors
    assert report.target.source.folder is None


def test_a_finished_download_is_a_model_everywhere(sharded, tmp_path, monkeypatch):
    folder = Path(snapshot_download("owner/model", allow_patterns=["*.json", "model*.safetensors"]))
    use_hub(monkeypatch)
    assert whole_copy("owner/model").folder == folder
    assert find_part("owner/model").source.folder == folder
    assert listed_in_the_cache(monkeypatch) == ["owner/model"]
    needed = downloads.needed(Source.of(sharded, "model"))
    assert downloads.needed_by(find_names(PairConfig("owner/model"))) == needed
    report = check_named(PairConfig("owner/model"))
    assert report.target.source.folder == folder
    assert not report.errors
