"""README and the pages of docs/: tables, links, commands and snippets hold as printed."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dflash_chat import main as chat
from dflash_mlx import DecodeConfig, corpus, doctor, load
from dflash_mlx.benchmark import __main__ as benchmark
from dflash_mlx.cli import disk, generate
from dflash_mlx.convert import __main__ as convert
from dflash_mlx.models.downloads import stored_bytes, weights_of
from dflash_mlx.models.names import DEFAULT_MODEL, registered
from dflash_mlx.serve import command as serve
from dflash_mlx.train import __main__ as train
from dflash_mlx.train import selector
from kernels_metal import sweep
from support.serving import serving

ROOT = Path(__file__).parents[2]
USUAL = "http://127.0.0.1:8080"  # where the server listens
README, MODELS = ROOT / "README.md", ROOT / "docs" / "models.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))
COMMANDS = {
    "dflash-chat": chat._parser,
    "dflash-serve": serve.parser,
    "dflash_mlx.generate": generate.parser,
    "dflash_mlx.benchmark": benchmark.parser,
    "dflash_mlx.doctor": doctor.parser,
    "dflash_mlx.convert": convert.parser,
    "dflash_mlx.corpus": corpus.parser,
    "dflash_mlx.serve": serve.parser,
    "dflash_mlx.train": train.parser,
    "dflash_mlx.train.selector": selector.parser,
    "kernels_metal.sweep": sweep.parser,
}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def rows_of(page: Path, least: int) -> list[list[str]]:
    """The cells of each row of a page's table of Macs."""
    lines = text_of(page).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \d+ GB", line)]
    assert len(rows) >= least
    return rows


def gigabytes(cell: str) -> float:
    return float(cell.split(" GB")[0])


def computed(name: str, bits: int) -> float:
    """Gigabytes of a target of the registry."""
    entry = registered(name)
    assert entry is not None, name
    return stored_bytes(weights_of(entry.name, entry.billions), bits) / 1e9


def test_the_table_of_targets_has_the_registry_s_drafters_and_sizes():
    rows = rows_of(MODELS, 21)
    for _, targets, four, eight, drafters in rows[1:]:  # behind the built-in pair
        known = [registered(target) for target in targets.split(", ")]
        assert None not in known, targets
        for size, bits in ((four, 4), (eight, 8)):
            assert gigabytes(size) == pytest.approx(computed(known[0].name, bits), rel=0.04), (
                targets
            )
        for shown in re.findall(r"`([^`]+)`", drafters):
            assert any(entry.drafter.endswith(shown.lstrip(".")) for entry in known), shown
    needs = [gigabytes(row[2]) for row in rows]
    room = [gigabytes(row[0]) for row in rows]
    assert room == sorted(room) and all(n < 2 / 3 * r for n, r in zip(needs, room, strict=True))


def test_each_model_of_the_readme_is_known_is_in_the_long_table_and_fits_with_its_drafter():
    long = text_of(MODELS)
    rows = rows_of(README, 5)
    assert len(rows) == 5
    for mac, command, model, drafter in rows:
        name = chat._parser().parse_args(shlex.split(command.strip("`"))).model
        assert registered(name).name.split("/")[1] in long
        assert gigabytes(model) == pytest.approx(computed(name, 4), rel=0.04), name
        assert gigabytes(model) + gigabytes(drafter) + 2 < 2 / 3 * gigabytes(mac) + 0.1, name
        sizes = re.findall(re.escape(registered(name).drafter) + r"` \((\d\.\d) GB", long)
        assert "assumed" in drafter or gigabytes(drafter) == pytest.approx(float(sizes[0])), name


# Links


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text_of(page)):
        file, _, anchor = link.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


def test_the_list_of_pages_has_them_all():
    listed = text_of(ROOT / "docs" / "README.md")
    assert [
        page.name for page in PAGES if page.parent.name == "docs" and page.name not in listed
    ] == []


# Commands


def shell(page: Path) -> Iterator[str]:
    """The lines of a page that are for a shell, those that go on joined."""
    text = text_of(page).replace("\\\n", " ")
    text = re.sub(r"```(?!sh\b)\w+\n.*?```", "", text, flags=re.DOTALL)
    for line in re.findall(r"^(?: {4}| {3})(?! )(.+)$|^\| `([^`]+)` \|", text, re.MULTILINE):
        yield line[0] or line[1]


def arguments(line: str) -> tuple[str, list[str]] | None:
    """The command of ours that a line starts, and its words; None where there is none."""
    words = shlex.split(line, comments=True)
    words = words[words.index("|") + 1 :] if "|" in words else words
    while words and (re.match(r"[A-Z_]+=", words[0]) or words[0] == "mlx.launch"):
        words = words[words.index("--") + 1 :] if words[0] == "mlx.launch" else words[1:]
    if not words:
        return None
    scripts = {"scripts/chat": "dflash-chat", "scripts/serve": "dflash-serve"}
    first = scripts.get(words[0], words[0])
    if first.endswith("python") and words[1:2] == ["-m"]:
        first, words = words[2], words[2:]
    return (first, words[1:]) if first in COMMANDS else None


def commands() -> list[tuple[str, str, list[str]]]:
    found = []
    for page in PAGES:
        for line in shell(page):
            ours = re.search(r"dflash|kernels_metal|scripts/(chat|serve)", line)
            if ours and (known := arguments(line)):
                found.append((page.name, *known))
    return found


def test_the_commands_of_all_pages_are_taken(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cat.json").write_text("{}", encoding="utf-8")  # which its page writes
    monkeypatch.setattr(disk, "download", lambda config: None)
    monkeypatch.setattr(disk, "_print", lambda lines: None)
    monkeypatch.setattr(disk, "cache_entries", lambda here: [])
    monkeypatch.setattr(disk, "find_entries", lambda names, kept: [])
    found = commands()
    assert len(found) > 40 and {name for _, name, _ in found} >= COMMANDS.keys() - {
        "dflash_mlx.serve"
    }
    for page, name, words in found:
        if words[:1] in (["models"], ["clean"]):
            chat.run(words)
            continue
        try:
            given = COMMANDS[name]().parse_args(words)
        except SystemExit as error:
            assert error.code == 0, (page, name, words)
            continue
        files = [vars(given).get("prompts"), vars(given).get("openings")]
        ours = [str(file) for file in files if str(file).startswith(("dflash_mlx/", "scripts/"))]
        assert [file for file in ours if not (ROOT / file).exists()] == [], page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_to_be_pasted_has_no_placeholder_or_remark_that_a_shell_takes_for_something_else(
    page,
):
    """`<this repository>` redirects, and zsh, the shell of a Mac, hands on what stands behind #."""
    lines = [line for line in shell(page) if re.match(r"(\S*python|dflash|scripts|git|uv)\b", line)]
    assert [line for line in lines if re.search(r"<[\w ]+>", line)] == []
    assert [line for line in lines if " #" in line] == []
    assert subprocess.run(["sh", "-n"], input="\n".join(lines), text=True).returncode == 0


# Python


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL)


@pytest.mark.real
@pytest.mark.parametrize("page", [*filter(snippets, PAGES)], ids=lambda page: page.name)
def test_the_examples_in_python_run_and_print_their_answers(page, capsys):
    expected = {
        "README.md": ["sky", r"\d\.\d\d tokens per round"],
        "python.md": ["sky", r"\d\.\d\d tokens", r"\d+ tokens in the caches", r"Name a river\."],
        "structured.md": ["{'name': "],
        "compatibility.md": [r"\d{8} bytes of memory"],
        "serve.md": [r"1\. .*\{.*'rounds': \d", r"1\. .*output_tokens=\d"],
    }
    with ExitStack() as stack:
        if page.name == "serve.md":  # its clients ask the server that the page starts
            usual = DecodeConfig(max_tokens=60)
            server = stack.enter_context(serving(load(), usual, DEFAULT_MODEL))
        for code in snippets(page):
            if page.name == "serve.md":
                assert code.count(USUAL) == 1
                code = code.replace(USUAL, server.url)
            exec(compile(code, page.name, "exec"), {})
    printed = capsys.readouterr().out
    wanted = expected[page.name]
    assert [part for part in wanted if not re.search(part, printed, re.DOTALL)] == []
