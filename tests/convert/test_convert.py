"""Targets and drafters decode and draft after a conversion as before."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from dflash_mlx import load
from dflash_mlx.convert.__main__ import main
from dflash_mlx.convert.conversion import described
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.networks.files import parameters_of, quantize_network
from dflash_mlx.models.check import check_drafter
from dflash_mlx.models.read import LIKELY_TOKENS
from support import reference_dflash2
from support.converted import assert_same_tensors, config, convert, tensors
from support.drafter_formats import FORMATS, case, version_1, write_shards
from support.families import FAMILIES, make_model
from support.hub_server import Hub, serve, use_hub
from support.models import write_drafter, write_model
from support.reference_dflash import write_drafter_folder

CLOSE = 1e-4
PROMPT = mx.array([[7, 3, 11, 2, 29, 5]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_a_converted_target_gives_the_logits_and_tokens_of_the_original(tmp_path, family):
    original = make_model(family)
    source = write_model(tmp_path / "source", original, **FAMILIES[family])
    folder = convert(source, tmp_path / "dst")
    assert mx.abs(load_model(folder)[0](PROMPT) - original(PROMPT)).max().item() <= CLOSE
    assert load(model=str(folder)).target.name == str(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        (["--bits", "8", "--group-size", "32"], {8}),
        (["--bits", "4", "--dtype", "bfloat16"], {4}),
    ],
)
def test_a_target_is_quantised_as_asked_for_and_loads(model, tmp_path, options, bits):
    folder = convert(model, tmp_path / "dst", *options)
    modules = load_model(folder)[0].modules()
    assert {module.bits for module in modules if hasattr(module, "bits")} == bits
    plain = {array.dtype for array in tensors(folder).values()} - {mx.uint32, mx.uint8}
    assert plain == {mx.bfloat16 if "bfloat16" in options else mx.float32}


def test_the_dtype_that_the_checkpoint_names_is_taken_unless_another_is_asked_for(tmp_path):
    source = write_model(tmp_path / "source", torch_dtype="bfloat16")
    for options, folder in (([], "named"), (["--dtype", "float16"], "cast")):
        convert(source, tmp_path / folder, *options)
        dtype = mx.float16 if options else mx.bfloat16
        assert {array.dtype for array in tensors(tmp_path / folder).values()} == {dtype}


def test_a_target_that_is_quantised_is_not_quantised_again(model, tmp_path):
    four = convert(model, tmp_path / "four", "--bits", "4", "--group-size", "32")
    with pytest.raises(DFlashError, match="already quantised to 4 bits .*mlx_lm.convert"):
        convert(four, tmp_path / "eight", "--bits", "8")
    again = convert(four, tmp_path / "again")
    assert_same_tensors(tensors(four), tensors(again))


# Drafters


WIDE = {"intermediate_size": 128}  # rows that groups of 64 divide


@pytest.mark.parametrize("name", FORMATS)
def test_a_converted_drafter_has_config_and_weights_of_the_original(tmp_path, name):
    write = write_shards if len(name) % 2 else write_drafter_folder
    source = write(tmp_path / "source", *FORMATS[name])
    converted = convert(source, tmp_path / "dst")
    assert FILES.read_drafter(converted).config == FILES.read_drafter(source).config
    unneeded = {"t2d", "verifier_norm.weight"}
    stored = {name: array for name, array in tensors(source).items() if name not in unneeded}
    assert_same_tensors(tensors(converted), stored)


def test_a_drafter_is_cast_if_asked_for_and_says_so_and_keeps_its_likely_tokens(tmp_path):
    source = write_drafter(tmp_path / "source")
    np.save(source / LIKELY_TOKENS, np.array([4, 2], np.uint16))
    for dtype, options in (("float32", []), ("bfloat16", ["--dtype", "bfloat16"])):
        converted = convert(source, tmp_path / dtype, *options)
        assert {array.dtype for array in tensors(converted).values()} == {getattr(mx, dtype)}
        assert config(converted)["dtype"] == dtype
        assert np.load(converted / LIKELY_TOKENS).tolist() == [4, 2]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("raw", [version_1(**WIDE), reference_dflash2.tiny_config(**WIDE)])
def test_a_quantised_drafter_is_that_which_loading_packs(tmp_path, bits, raw):
    source = write_drafter_folder(tmp_path / "source", *case(raw))
    converted = convert(source, tmp_path / "dst", "--bits", str(bits))
    network = FILES.load_network(source, FILES.read_drafter(source).config, mx.float32)
    quantize_network(network, bits, 64)
    assert config(converted)["quantization"] == {"group_size": 64, "bits": bits}
    assert_same_tensors(tensors(converted), parameters_of(network))
    with pytest.raises(DFlashError, match=f"already quantised to {bits} bits"):
        convert(converted, tmp_path / "again", "--bits", "4")
    assert_same_tensors(tensors(convert(converted, tmp_path / "copy")), tensors(converted))


# On a hub, which is on this machine


def in_bfloat16(drafter: Path, but: str = "no tensor") -> Path:
    """A drafter's weights in bfloat16, float32 for those with `but` in their names."""
    weights = {
        name: array.astype(mx.float32 if but in name else mx.bfloat16)
        for name, array in tensors(drafter).items()
    }
    mx.save_safetensors(str(drafter / "model.safetensors"), weights)
    return drafter


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with a target and a drafter, and an empty cache."""
    repositories = {
        "owner/model": write_model(tmp_path / "hub" / "model"),
        "owner/drafter": in_bfloat16(write_drafter(tmp_path / "hub" / "drafter")),
        "owner/mixed": in_bfloat16(write_drafter(tmp_path / "hub" / "mixed"), "proj"),
        "owner/speculators": write_drafter_folder(
            tmp_path / "hub" / "speculators", *FORMATS["speculators, draft vocabulary"]
        ),
    }
    (tmp_path / "out").mkdir()
    with serve(repositories, tmp_path / "cache") as served:
        yield served


def test_a_repository_converts_as_the_folder_it_serves_once_it_is_here_without_a_network(
    hub, tmp_path, monkeypatch
):
    """With its licence; copies of the weights for other libraries are left out."""
    folder = hub.repositories["owner/model"]
    shutil.copyfile(folder / "model.safetensors", folder / "consolidated.safetensors")
    (folder / "LICENSE").write_text("free")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    main(["owner/model", str(tmp_path / "out" / "online")])
    use_hub(monkeypatch)
    main(["owner/model", str(tmp_path / "out" / "offline")])
    main([str(folder), str(tmp_path / "out" / "local")])
    local, online, offline = (
        {file.name: file.read_bytes() for file in (tmp_path / "out" / name).iterdir()}
        for name in ("local", "online", "offline")
    )
    assert online == local and offline == local
    assert "consolidated.safetensors" not in local and local["LICENSE"] == b"free"
    assert [r for r in hub.requests if "consolidated" in r[1]] == []


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("owner/model", [], "target    owner/model: llama in float32, "),
        ("owner/model", ["--bits", "4"], "target .*: llama in 4 bits, "),
        (
            "owner/drafter",
            [],
            "drafter   owner/drafter: DFlashDraftModel in bfloat16, blocks of 8, ",
        ),
        ("owner/mixed", [], "drafter .*: DFlashDraftModel in bfloat16, blocks of 8, "),
        ("owner/speculators", [], "drafter .*: DFlashDraftModel in float32, blocks of 6, "),
    ],
)
def test_a_dry_run_fetches_heads_only_and_foretells(hub, tmp_path, capsys, name, options, words):
    arguments = [name, str(tmp_path / "out" / "dst"), *options]
    main([*arguments, "--check"])
    first, *rest = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in rest] == ["disk", "download", "memory"]
    assert hub.fetched() == ["bytes=0-100000"]
    stored = hub.repositories[name] / "model.safetensors"
    cached = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert stored.stat().st_size not in [file.stat().st_size for file in cached]
    assert list((tmp_path / "out").iterdir()) == []
    main(arguments)
    written = tensors(tmp_path / "out" / "dst").values()
    size = sum(array.nbytes for array in written)
    assert re.match(words, first)
    if "--bits" not in options:  # of a quantised target the size is about
        assert first.endswith(f" {size / 1000:.1f} kB")


@pytest.mark.parametrize("name", ["version 1", "version 2", "speculators, draft vocabulary"])
def test_heads_describe_a_drafter_of_mixed_numbers_as_its_weights_do(tmp_path, name):
    raw, weights = FORMATS[name]
    auto_map = {"AutoModel": f"modeling.{raw['architectures'][0]}"}
    folder = write_drafter_folder(tmp_path, {**raw, "auto_map": auto_map}, weights)
    if "draft vocabulary" not in name:
        in_bfloat16(folder, "proj")
    facts = check_drafter(folder)
    found, read = described(facts), facts.format.read_drafter(folder)
    assert found.raw == read.raw and "auto_map" not in found.raw
    form = [{n: (a.dtype, a.shape) for n, a in each.tensors.items()} for each in (found, read)]
    assert form[0] == form[1] and len({dtype for dtype, _ in form[0].values()}) == 2


def test_a_download_that_does_not_fit_is_refused_before_it_begins(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(DFlashError, match=r"the download needs .* MB, .* 1\.0 MB"):
        main(["owner/model", str(tmp_path / "out" / "dst")])
    assert hub.fetched() == ["bytes=0-100000"]
