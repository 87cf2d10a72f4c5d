"""Who is compared: what pip installs, what each is started with, and what it needs here."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

BLAS = "the BLAS of ours is loaded before MLX"
FLOATS = "target and drafter are written in float32, the fast type of MLX's CPU backend"
WITHOUT_METAL = (BLAS, FLOATS)  # for all of them, where MLX has no Metal

Requirements = tuple[tuple[str, ...], ...]  # for one call of pip after the other
OURS = ""  # the environment that this runs in
APART = "apart"  # that of a package with our name, which reads another pair
_MLX = ("mlx[cpu]", "cmeel-openblas<0.3.30") if sys.platform == "linux" else ("mlx",)
# Without torch and vision, which are two gigabytes and of no use to text.
_RAPID = (
    *("mlx-lm<0.32", "transformers<5.16", "tokenizers<0.23", "huggingface-hub<2", "fastapi<0.163"),
    *("uvicorn", "python-multipart", "tiktoken", "pypdf", "tomli-w", "requests", "rich", "psutil"),
    *("tabulate", "mcp<2", "jsonschema", "argcomplete", "websockets", "openai-harmony"),
    *("llguidance", "pillow", *_MLX),
)
ENVIRONMENTS: Mapping[str, Requirements] = {
    "common": (("mlx-lm", "mlx-vlm", "mlx-dspark", *_MLX), ("--no-deps", "dflash")),
    "rapid": (_RAPID, ("--no-deps", "rapid-mlx")),
    APART: (("dflash-mlx", *_MLX),),
}


@dataclass(frozen=True)
class Server:
    """A server that speaks OpenAI's API; words may hold {target}, {drafter} and {port}."""

    package: str  # whose version is told
    words: tuple[str, ...]  # behind `python -m`
    environment: str = "common"
    model: str = "{target}"  # as requests call it
    more: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # of a request
    without_metal: tuple[str, ...] = ()  # further words
    needs_drafter: bool = False
    gives_up: str = ""  # in its log: that it goes on without drafts, and behind it why

    def command(self, places: Mapping[str, str], metal: bool) -> list[str]:
        words = self.words if metal else (*self.words, *self.without_metal)
        return [word.format(**places) for word in words]


_OURS = ("dflash_mlx.serve", "--port", "{port}", "--config", "none", "--prefix-disk-gb", "0")
# Requests that were answered before would be copied from; nobody else could do that.
_APART = MappingProxyType({"lookup_in": "conversation"})
_VLM = ("mlx_vlm.server", "--model", "{target}", "--host", "127.0.0.1", "--port", "{port}")
WITH_DRAFTS, WITHOUT = "ours with drafts", "ours without"
SERVERS: Mapping[str, Server] = {
    WITH_DRAFTS: Server("dflash-chat", (*_OURS, "--method", "auto"), OURS, "", _APART),
    WITHOUT: Server("dflash-chat", (*_OURS, "--method", "none"), OURS, "", _APART),
    "mlx_lm.server": Server(
        "mlx-lm", ("mlx_lm", "server", "--model", "{target}", "--port", "{port}")
    ),
    "mlx-vlm": Server("mlx-vlm", _VLM),
    "mlx-vlm with drafts": Server(
        "mlx-vlm",
        (*_VLM, "--draft-model", "{drafter}", "--draft-kind", "dflash"),
        needs_drafter=True,
        gives_up="falling back to autoregressive generation",
    ),
    "rapid-mlx": Server(
        "rapid-mlx",
        ("rapid_mlx.cli", "serve", "{target}", "--host", "127.0.0.1", "--port", "{port}"),
        "rapid",
    ),
    "mlx-dspark": Server(
        "mlx-dspark",
        ("mlx_dspark", "serve", "--model", "{target}", "--drafter", "{drafter}", "--mode", "dflash",
         "--max-batch", "8", "--port", "{port}"),
        without_metal=("--drafter-bits", "0", "--no-small-m", "--no-sdpa-split",
                       "--no-multirow-attn", "--wide-gemm-min", "0", "--cpu-split", "0"),
        needs_drafter=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Alone:
    """Who answers one request after the other in a process of its own, by `worker.py`."""

    package: str
    who: str  # of worker.py
    environment: str = "common"
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    needs: tuple[str, ...] = ()  # places that the pair must have: drafter, small, head
    patches: tuple[str, ...] = ()


def _options(**named: Any) -> Mapping[str, Any]:
    return MappingProxyType(named)


_DFLASH, _DRAFTER = _options(draft="dflash"), ("drafter",)
ALONE: Mapping[str, Alone] = {
    "ours": Alone("dflash-chat", "ours", OURS, _options(method="auto")),
    "ours plain": Alone("dflash-chat", "ours", OURS, _options(method="none")),
    "mlx-lm": Alone("mlx-lm", "mlx_lm"),
    "mlx-lm small": Alone("mlx-lm", "mlx_lm", options=_options(draft=True), needs=("small",)),
    "z-lab": Alone("dflash", "zlab", needs=_DRAFTER, patches=("z-lab's dflash reads a folder",)),
    "mlx-dspark": Alone(
        "mlx-dspark",
        "dspark",
        needs=_DRAFTER,
        patches=("mlx-dspark does not quantise the drafter, and tries no kernels",),
    ),
    "mlx-vlm": Alone("mlx-vlm", "vlm"),
    "mlx-vlm DFlash": Alone("mlx-vlm", "vlm", options=_DFLASH, needs=_DRAFTER),
    "dflash-mlx": Alone("dflash-mlx", "dflash_mlx", APART, needs=_DRAFTER),
    "mlx-vlm MTP": Alone("mlx-vlm", "vlm", options=_options(draft="mtp"), needs=("head",)),
}
PLAIN = "ours plain"  # what answers are compared with


def chosen(names: str | None, known: Sequence[str]) -> list[str]:
    """Those of a comma-separated list, in its order; all without one."""
    from dflash_mlx.core.errors import DFlashError

    asked = list(known) if names is None else [name.strip() for name in names.split(",")]
    if unknown := [name for name in asked if name not in known]:
        what = f"--peers has {unknown[0]!r}"
        raise DFlashError(what, f"choose from {', '.join(known)}")
    return asked
