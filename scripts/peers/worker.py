"""One peer in a process of its own: `python worker.py WHO TARGET DRAFTER SMALL OPTIONS`.

It reads a line of JSON for each prompt (`tokens`, `most`) and writes one: the tokens of the greedy
answer, the seconds until the first of them (`first`), how many came with it (`begun`), and the
seconds of all. Only what WHO needs is imported, and nothing of ours but for ourselves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Said = tuple[list[int], float]  # tokens, and when they came
Answer = Callable[[list[int], int], Iterator[Said]]


class Places(NamedTuple):
    """Folders, "" for what there is not; options: more that a peer is told."""

    target: str
    drafter: str
    small: str
    options: dict[str, Any]


def now(tokens: list[int]) -> Said:
    return tokens, time.perf_counter()


def ours(places: Places) -> Answer:
    from dflash_mlx import DecodeConfig, PairConfig, Session, load

    pair = load(PairConfig(**places.options["pair"]))
    pair.calibrate()
    drafters: Any = {}

    def answer(tokens: list[int], most: int) -> Iterator[Said]:
        config = DecodeConfig(places.options["method"], max_tokens=most)
        for delta in Session(pair, config, drafters=drafters).stream(tokens):
            yield now(list(delta.tokens))

    return answer


def mlx_lm(places: Places) -> Answer:
    from mlx_lm import load, stream_generate

    model, tokenizer = load(places.target)
    more = {"draft_model": load(places.small)[0]} if places.options.get("draft") else {}

    def answer(tokens: list[int], most: int) -> Iterator[Said]:
        for said in stream_generate(model, tokenizer, tokens, most, **more):
            yield now([said.token])

    return answer


def zlab(places: Places) -> Answer:
    from dflash import model_mlx
    from mlx_lm import load

    model, tokenizer = load(places.target)
    model_mlx.snapshot_download = lambda folder, **_: folder
    draft = model_mlx.load_draft(places.drafter)

    def answer(tokens: list[int], most: int) -> Iterator[Said]:
        for said in model_mlx.stream_generate(model, draft, tokenizer, tokens, max_tokens=most):
            yield now(said.tokens)

    return answer


def dspark(places: Places) -> Answer:
    """As its command line does it: how many drafts it verifies comes from what it measures."""
    from mlx_dspark.generate import dflash_generate
    from mlx_dspark.load import load_dflash, load_target

    calibrate: Any = sys.modules["mlx_dspark.calibrate"]  # the package shows a function
    target, tokenizer = load_target(places.target, require_tap=True)
    packed = places.options["quantize"]
    drafter, config = load_dflash(places.drafter, quantize=packed)
    drafter.bind(target.model)
    names = {"target_repo": places.target, "drafter_repo": places.drafter}
    if packed:  # on a Mac, where its kernels run
        calibrate.apply_small_m(target, drafter, **names)
        calibrate.apply_sdpa_split(target, target_repo=places.target)
        calibrate.apply_multirow_attn(target, drafter)
        calibrate.apply_wide_gemm(target, drafter, target_repo=places.target, min_rows=None)
        calibrate.apply_cpu_split(target, drafter, target_repo=places.target, frac=None)
    most_drafts = calibrate.static_cap(
        target, drafter, mode="dflash", fallback=max(1, config.block_size - 1), **names
    )

    def answer(tokens: list[int], most: int) -> Iterator[Said]:
        begin = time.perf_counter()
        found = dflash_generate(
            target, tokenizer, drafter,
            prompt_ids=tokens, max_new_tokens=most, max_draft_tokens=most_drafts,
        )  # fmt: skip
        yield found.token_ids[:1], begin + found.prefill_seconds
        yield now(found.token_ids[1:])

    return answer


def vlm(places: Places) -> Answer:
    import mlx.core as mx
    from mlx_vlm import load
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.speculative.drafters import load_drafter

    model, _ = load(places.target)
    more: dict[str, Any] = {}
    if kind := places.options.get("draft"):
        where = places.drafter if kind == "dflash" else places.target
        model_, resolved = load_drafter(where, kind=kind)
        more = {"draft_model": model_, "draft_kind": resolved}

    def answer(tokens: list[int], most: int) -> Iterator[Said]:
        asked = mx.array([tokens])
        steps = generate_step(asked, model, None, None, max_tokens=most, temperature=0.0, **more)
        for token, _ in steps:
            yield now([int(token)])

    return answer


def dflash_mlx(places: Places) -> Answer:
    """The package of that name on PyPI, in whose environment ours is not."""
    from dflash_mlx.runtime.bundle import load_runtime_bundle
    from dflash_mlx.runtime.context import build_offline_runtime_context

    from dflash_mlx import runtime

    context = build_offline_runtime_context()
    loaded = load_runtime_bundle(
        model_ref=places.target, draft_ref=places.drafter, verify_config=context.verify
    )
    ends = runtime.get_stop_token_ids(loaded.tokenizer)

    def answer(tokens: list[int], most: int) -> Iterator[Said]:
        events = runtime.stream_dflash_generate(
            target_model=loaded.target_model, target_ops=loaded.target_ops,
            tokenizer=loaded.tokenizer, draft_model=loaded.draft_model,
            draft_backend=loaded.draft_backend, prompt_tokens_override=tokens,
            max_new_tokens=most, stop_token_ids=ends, runtime_context=context,
        )  # fmt: skip
        for event in events:
            if type(event).__name__ == "TokenEvent":
                yield now([int(event.token_id)])

    return answer


WHO = {each.__name__: each for each in (ours, mlx_lm, zlab, dspark, vlm, dflash_mlx)}


def ends_of(target: str) -> set[int]:
    """Tokens that end an answer, by config.json."""
    ends = json.loads((Path(target) / "config.json").read_text()).get("eos_token_id")
    return set(ends if isinstance(ends, list) else [] if ends is None else [ends])


def asked(answer: Answer, prompt: list[int], most: int, ends: set[int]) -> dict[str, Any]:
    """An answer up to what ends it, which is not told, and its times."""
    begin, tokens, first, last = time.perf_counter(), list[int](), 0.0, 0.0
    begun = 0
    stream = answer(prompt, most)
    for said, when in stream:
        if not said:
            continue
        tokens += said
        last = when
        if not begun:
            begun, first = len(said), when
        if ends & set(said) or len(tokens) >= most:
            break
    close = getattr(stream, "close", None)
    if close is not None:
        close()
    end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    seconds = {"first": first - begin, "seconds": last - begin}
    return {"tokens": tokens[: min(end, most)], "made": len(tokens), "begun": begun, **seconds}


def main() -> None:
    sys.path.pop(0)  # this folder, whose files have names that others may have, too
    who, target, drafter, small, options = sys.argv[1:]
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a peer prints is no answer

    def tell(found: dict[str, Any]) -> None:
        told.write(json.dumps(found) + "\n")
        told.flush()

    answer, ends = WHO[who](Places(target, drafter, small, json.loads(options))), ends_of(target)
    tell({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        tell(asked(answer, request["tokens"], request["most"], ends))


if __name__ == "__main__":
    main()
