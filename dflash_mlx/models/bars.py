"""What huggingface_hub takes for a class of progress bars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from huggingface_hub.utils.tqdm import tqdm as HubBar  # noqa: N812 - a class
from tqdm.auto import tqdm

_FORM = "{desc}, {n_fmt}B of {total_fmt}B: {percentage:3.0f}%|{bar}|"


def naming(name: str) -> type:
    """Bars that say what comes and how much of it; the hub's own say no total."""

    class Bar(HubBar):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            if keywords.get("unit") == "B":
                keywords |= {"desc": f"downloading {name}", "bar_format": _FORM}
            super().__init__(*arguments, **keywords)

    return Bar


def telling(advance: Callable[[float], None]) -> type:
    """Bars that show nothing and tell `advance` of bytes; what it raises ends the download."""

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **{**keywords, "disable": True})

        def update(self, count: float | None = 1) -> None:
            advance(count or 0)

        def update_transfer(self, _: float | None = 1) -> None:
            """Bytes on the network, of which Xet needs fewer than it writes."""

        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None:
            pass

    return Bar
