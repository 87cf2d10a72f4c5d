"""Build what is released, and install it in every way that users would, each into empty folders.

    .venv/bin/python scripts/release.py OUT [--ways pip uv ...] [--suite] [--resolve] [--url URL]

OUT receives the wheel, the source distribution (the wheel is built from it), a Homebrew formula and
a folder for each way. An index on this machine has the two; what they need comes from pip's usual
one. Each way is timed with empty caches, and the installed command prints its version and one
answer. `clash` installs a package that has the same import name and looks at what is said. --suite
unpacks the source distribution and runs a part of its suite there. --resolve asks for the wheels of
a Mac for every Python. --url is where the source distribution will lie, for the formula. Ends with
1 where something is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("build", "uv", "pipx")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
CLASH = "dflash-mlx==0.1.8"  # on PyPI: another program, whose import name is ours
SUITE = ("tests/core", "tests/scripts/test_small_scripts.py", "tests/serve/test_web_page.py")
IN_WHEEL = (
    *(str(file.relative_to(ROOT)) for file in (ROOT / "dflash_mlx/serve/page").iterdir()),
    "dflash_mlx/models/models.toml", "dflash_mlx/data/smollm2-135m-dflash/model.safetensors",
    "kernels_metal/source/", "dflash_chat/main.py", "dflash_mlx/py.typed",
)  # fmt: skip
NOT_IN_WHEEL = ("tests/", "scripts/", "docs/", "kernels_metal/emulator/", "app/")
IN_SDIST = (
    "tests/conftest.py",
    "scripts/test",
    "scripts/_venv.sh",
    "constraints.txt",
    "docs/serve.md",
)


def run(*command: object, cwd: Path = ROOT, **more: str) -> tuple[float, str]:
    """Seconds and what was printed; CalledProcessError, with that, where the command fails."""
    begun = time.monotonic()
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env={**clean(), **more}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    return time.monotonic() - begun, done.stdout


def clean() -> dict[str, str]:
    """The environment without what belongs to the checkout's own Python."""
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def size(folder: Path) -> int:
    """Bytes of all files; what has several names counts once."""
    found = {(s.st_dev, s.st_ino): s.st_size for f in folder.rglob("*") if (s := f.lstat())}
    return sum(found.values())


def amount(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


# What is released


def build(out: Path, python: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution, in the folder that an index has for them."""
    index = out / "index" / "dflash-chat"
    seconds, _ = run(python, "-m", "build", "--outdir", index, ROOT)
    (wheel,), (source,) = index.glob("*.whl"), index.glob("*.tar.gz")
    sizes = f"{wheel.name} {amount(wheel.stat().st_size)}, {source.name} "
    print(f"built in {seconds:.0f} s: {sizes}{amount(source.stat().st_size)}")
    return wheel, source


def look_into(wheel: Path, source: Path) -> list[str]:
    """What is missing from the two, or should not be there."""
    names = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(source) as archive:
        packed = [name.partition("/")[2] for name in archive.getnames()]
    wrong = [f"the wheel lacks {n}" for n in IN_WHEEL if not any(x.startswith(n) for x in names)]
    wrong += [f"the wheel has {n}" for n in NOT_IN_WHEEL if any(x.startswith(n) for x in names)]
    wrong += [f"the source distribution lacks {name}" for name in IN_SDIST if name not in packed]
    print(f"the wheel has {len(names)} files, the source distribution {len(packed)}")
    return wrong


def formula(source: Path, url: str) -> str:
    """The Homebrew formula of this source distribution; without a homepage where none is known."""
    text = (ROOT / "packaging" / "dflash-chat.rb").read_text("utf-8")
    known = {"@URL@": url, "@SHA256@": hashlib.sha256(source.read_bytes()).hexdigest()}
    known |= {"@HOMEPAGE@": of_project("Homepage")}
    for name, value in known.items():
        text = text.replace(name, value)
    return re.sub(r'  homepage ""\n', "", text)


@contextmanager
def indexed(folder: Path) -> Iterator[str]:
    """The address of an index, as pip asks for it, that has the projects in a folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()


# The ways to install it


def install(way: str, out: Path, tools: Path, index: str) -> list[str]:
    """Install, then answer; what went wrong."""
    home = out / way
    home.mkdir()
    places = {
        name: str(home / name.lower()) for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")
    }
    places |= {"UV_CACHE_DIR": str(home / "uv"), "UV_TOOL_DIR": str(home / "installed")}
    places |= {"UV_TOOL_BIN_DIR": str(home / "bin"), "UV_PYTHON_DOWNLOADS": "never"}
    places |= {"PIPX_HOME": str(home / "installed"), "PIPX_BIN_DIR": str(home / "bin")}
    places |= {"PIPX_DEFAULT_BACKEND": "pip"}  # or it takes the uv beside it
    places |= {
        "PIP_EXTRA_INDEX_URL": index,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "UV_INDEX": index,
    }
    commands: dict[str, list[list[object]]] = {
        "pip": [
            [sys.executable, "-m", "venv", home / "installed"],
            [home / "installed/bin/pip", "install", "dflash-chat[serve]"],
        ],
        "uv": [[tools / "uv", "tool", "install", "--python", base(), "dflash-chat[serve]"]],
        "pipx": [[tools / "pipx", "install", "--python", base(), "dflash-chat[serve]"]],
    }
    seconds = sum(run(*command, cwd=home, **places)[0] for command in commands[way])
    bin_ = home / ("installed/bin" if way == "pip" else "bin")
    wrong, told = try_out(bin_, home, places)
    kept = amount(size(home / "installed"))
    print(f"{way}: installed in {seconds:.0f} s, {kept}; {told}", flush=True)
    return wrong


def base() -> str:
    """This Python's own program, for an environment that is not inside of this one."""
    return str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")


def try_out(programs: Path, home: Path, places: dict[str, str]) -> tuple[list[str], str]:
    """What is wrong, and how long the first and a second answer took."""
    chat = programs / "dflash-chat"
    version = run(chat, "--version", cwd=home, **places)[1].split()[-1]
    answers = [run(chat, "--prompt", "What is 2 + 3?", cwd=home, **places) for _ in range(2)]
    help_ = run(programs / "dflash-serve", "--help", cwd=home, **places)[1]
    wrong = [] if version == of_project("version") else [f"--version says {version}"]
    wrong += [] if "5" in answers[1][1] else [f"it answered {answers[1][1]!r}"]
    wrong += [] if "dflash-serve" in help_ else ["dflash-serve has no help"]
    first, second = (f"{seconds:.0f} s" for seconds, _ in answers)
    return (
        wrong,
        f"first answer, with the model's download, after {first}, the second after {second}",
    )


def of_project(field: str) -> str:
    """What pyproject.toml says of itself, "" for nothing; 3.10 has no reader for such files."""
    found = re.search(rf'^{field} = "(.+)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    return found[1] if found else ""


def clash(out: Path) -> list[str]:
    """What is said where another package has put its files over ours, and below them."""
    bin_, wrong = out / "pip" / "installed" / "bin", []
    run(bin_ / "pip", "install", "--no-deps", CLASH)
    for program in ("dflash-chat", "dflash-serve"):
        done = subprocess.run(
            [bin_ / program, "--version"], capture_output=True, text=True, check=False
        )
        print(f"clash, theirs above: {program} ends with {done.returncode}: {done.stderr.strip()}")
        if done.returncode != 2 or CLASH.partition("=")[0] not in done.stderr:
            wrong.append(f"{program} does not name the clash")
    (wheel,) = (out / "index" / "dflash-chat").glob("*.whl")
    run(bin_ / "pip", "install", "--no-deps", "--force-reinstall", wheel)
    told = run(bin_ / "python", "-m", "dflash_mlx.doctor", cwd=out)[1]
    named = [line.strip() for line in told.splitlines() if CLASH.partition("=")[0] in line]
    print(f"clash, ours above: the doctor says: {' '.join(named)}")
    return wrong if named else [*wrong, "the doctor does not name the clash"]


def suite(out: Path, source: Path) -> None:
    """A part of the suite, in the unpacked source distribution and an environment of its own."""
    with tarfile.open(source) as archive:
        archive.extractall(out / "unpacked", filter="data")
    (folder,) = (out / "unpacked").iterdir()
    seconds, told = run(folder / "scripts" / "test", *SUITE, "-q", cwd=folder)
    print(f"the source distribution's own suite, {seconds:.0f} s: {told.strip().splitlines()[-1]}")


def resolve(tools: Path, wheel: Path) -> list[str]:
    """Whether every Python finds wheels of all that is needed on a Mac."""
    wrong = []
    for python in PYTHONS:
        command = [tools / "uv", "pip", "compile", "-q", "--no-header", "--no-annotate", "-"]
        command += ["--only-binary", ":all:", "--python-version", python]
        command += ["--python-platform", "aarch64-apple-darwin"]
        done = subprocess.run(
            [*map(str, command)], input=f"dflash-chat[serve] @ {wheel.as_uri()}", text=True,
            capture_output=True, check=False, env={**clean(), "MACOSX_DEPLOYMENT_TARGET": "14.0"},
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if "==" in line]
        named = [line for line in lines if re.match(r"(mlx|mlx-metal|numpy|tokenizers)==", line)]
        print(f"Python {python} on a Mac: {len(lines)} wheels, {' '.join(named)}")
        wrong += [f"Python {python}: {done.stderr.strip()}"] if done.returncode else []
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="an empty folder, or one that is not there")
    parser.add_argument("--ways", nargs="*", default=["pip", "uv", "pipx", "clash"])
    parser.add_argument("--suite", action="store_true")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--url", help="of the source distribution")
    given = parser.parse_args()
    out = given.out.resolve()
    if out.exists() and any(out.iterdir()):
        parser.error(f"{out} is not empty; name another folder")
    run(sys.executable, "-m", "venv", out / "tools")
    tools = out / "tools" / "bin"
    run(tools / "pip", "install", *TOOLS)
    wheel, source = build(out, tools / "python")
    wrong = look_into(wheel, source)
    written = formula(source, given.url or source.as_uri())
    (out / "dflash-chat.rb").write_text(written, encoding="utf-8")
    with indexed(out / "index") as index:
        for way in given.ways:
            wrong += clash(out) if way == "clash" else install(way, out, tools, index)
    wrong += resolve(tools, wheel) if given.resolve else []
    if given.suite:
        suite(out, source)
    print("\n".join(f"WRONG {each}" for each in wrong) or "nothing is wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
