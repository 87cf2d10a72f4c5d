"""What the worker thread runs: a pair, its session, and races between two of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from dflash_chat import memory
from dflash_chat.engine import OnPrefilled, Question
from dflash_chat.figures import Figures
from dflash_chat.messages import DRAFTED, PLAIN, ModelInfo, RaceStep, Round, Verdict
from dflash_chat.thinking import BEGIN
from dflash_chat.tree_view import FIRST, TARGET, DrawnTree, Piece
from dflash_mlx import (
    DecodeConfig,
    DFlashError,
    Observer,
    Pair,
    PairConfig,
    SamplingConfig,
    Session,
    TextDelta,
    prompt_tokens,
)
from dflash_mlx.core.accept import Accepted
from dflash_mlx.drafters.methods import draws_drafts, settle
from dflash_mlx.engine.parity import Difference, first_difference
from dflash_mlx.models.load import load_pair
from dflash_mlx.models.names import find_names
from dflash_mlx.target.pass_times import stored_times

SLICE = 1.0  # seconds that one side of a race runs before the other may
_TAIL = 8  # tokens at the end of a prompt in which a template may open a thought


class Backend:
    """One pair and one session; see `dflash_chat.engine.Backend`."""

    def __init__(self) -> None:
        self._pair: Pair | None = None
        self._session: Session | None = None
        self._texts: dict[int, str] = {}

    def load(self, config: PairConfig) -> ModelInfo:
        """Load a pair; what does not fit in memory is refused before."""
        names = find_names(config)
        memory.check(names.shown, memory.needed_by(names), memory.available())
        pair = load_pair(config)
        self._pair, self._session = pair, None
        self._texts.clear()
        target = pair.target
        length = target.context_length
        return ModelInfo(target.name, length, pair.means, pair.fallback, pair.notes)

    def plain_seconds(self) -> float | None:
        """From the times that budgets use; None for models whose passes cannot be timed."""
        target = self._loaded().target
        try:
            if target.pass_times is None:
                target.pass_times = stored_times(target)
        except DFlashError:
            return None
        return float(target.pass_times.of(1))

    def answer(self, question: Question, prefilled: OnPrefilled) -> Iterator[Round]:
        """The rounds of an answer; a thought that the template opened is opened in the text."""
        pair = self._loaded()
        session = self._session_for(question.config)
        tokens = prompt_tokens(pair.tokenizer, question.messages, question.system)
        detokenizer = pair.tokenizer.detokenizer
        opening, anchor = _opening(pair.tokenizer, tokens), tokens[-1]
        for delta in session.stream(tokens, _Prefill(prefilled)):
            done = self._round(delta, detokenizer, anchor)
            yield replace(done, text=opening + done.text) if opening else done
            opening, anchor = "", delta.tokens[-1]

    def race(self, question: Question) -> Iterator[RaceStep | Verdict]:
        """Both sides in turn, always the one that has had less time, from the same seed."""
        if question.config.method == "none":
            raise DFlashError(
                "the method is none, so both sides would decode plainly", "choose another /method"
            )
        pair = self._loaded()
        sampling = question.config.sampling.with_seed()
        config = settle(replace(question.config, sampling=sampling), pair.means)
        if draws_drafts(config):
            raise DFlashError(
                "answers drawn by rejection differ from plain ones, by design",
                "set acceptance to match in /settings to compare them token by token",
            )
        tokens = prompt_tokens(pair.tokenizer, question.messages, question.system)
        plain = Lane.start(PLAIN, Session(pair, replace(config, method="none")), tokens)
        drafted = Lane.start(DRAFTED, Session(pair, config), tokens)
        while running := [lane for lane in (drafted, plain) if not lane.finished]:
            yield from min(running, key=lambda lane: lane.seconds).run(SLICE)
        difference = first_difference(pair.target, tokens, plain.tokens, drafted.tokens)
        yield verdict(plain, drafted, difference)

    def _loaded(self) -> Pair:
        if self._pair is None:
            raise DFlashError("no model is loaded", "choose one with /model")
        return self._pair

    def _session_for(self, config: DecodeConfig) -> Session:
        """The session with its caches; a new one only where drafting itself has changed."""
        config = settle(config, self._loaded().means)
        session = self._session
        if session is None or _drafting(session.config) != _drafting(config):
            session = self._session = Session(self._loaded(), config)
        session.config = config
        return session

    def _round(self, delta: TextDelta, detokenizer: Any, anchor: int) -> Round:
        accepted = delta.accepted
        pieces = []
        for i, token in enumerate(delta.tokens):
            detokenizer.add_token(token)
            pieces.append(Piece(detokenizer.last_segment, _origin(accepted, i)))
        tree = accepted.tree
        drawn = DrawnTree(
            texts=tuple(map(self._text, (anchor, *tree.drafted))),
            parents=tree.parents,
            path=accepted.path,
            next_text=self._text(accepted.tokens[-1]),
            reason=delta.proposal.reason,
        )
        figures = Figures.of(delta.statistics, self._loaded().target.context_length)
        return Round(delta.text, tuple(pieces), drawn, figures, delta.finish_reason)

    def _text(self, token: int) -> str:
        """A token alone, remembered: a round's tree has dozens."""
        if token not in self._texts:
            self._texts[token] = self._loaded().tokenizer.decode([token])
        return self._texts[token]


class _Prefill(Observer):
    """Passes on how far prefill is."""

    def __init__(self, prefilled: OnPrefilled) -> None:
        self._prefilled = prefilled

    def prefilled(self, tokens: int, total: int) -> None:
        self._prefilled(tokens, total)


@dataclass
class Lane:
    """One side of a race. seconds: of decoding, its unfinished device work included."""

    side: str
    deltas: Iterator[TextDelta]
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    finished: bool = False

    @classmethod
    def start(cls, side: str, session: Session, prompt: list[int]) -> Lane:
        return cls(side, session.stream(prompt))

    def run(self, seconds: float) -> Iterator[RaceStep]:
        """Decode for so long, then wait for the device, lest it work in the other's time."""
        end = self.seconds + seconds
        while self.seconds < end and not self.finished:
            begin = time.perf_counter()
            delta = next(self.deltas)
            first = not self.tokens
            self.tokens.extend(delta.tokens)
            self.finished = delta.finish_reason is not None
            self.seconds += time.perf_counter() - begin
            if first:
                self.seconds -= delta.statistics.prefill_seconds
            yield RaceStep(self.side, delta.text, len(self.tokens), self.seconds, self.finished)
        begin = time.perf_counter()
        mx.synchronize()
        self.seconds += time.perf_counter() - begin


def verdict(plain: Lane, drafted: Lane, difference: Difference | None) -> Verdict:
    """Who was faster, and whether both said the same, token by token."""
    ratio = plain.seconds / drafted.seconds * len(drafted.tokens) / len(plain.tokens)
    speed = f"{ratio:.2f} times as fast as plain decoding on this question"
    if difference is None:
        return Verdict(f"All {len(plain.tokens)} tokens are the same. {speed}.", True)
    if difference.margin is None:
        why = "one answer ends there"
    elif difference.is_near_tie:
        why = f"where two tokens are all but tied (logits {difference.margin:.1e} apart)"
    else:
        why = f"with logits {difference.margin:.2f} apart, which is no tie: please report it"
    return Verdict(f"The same up to token {difference.position}, {why}. {speed}.", False)


def _origin(accepted: Accepted, i: int) -> str:
    """Where token i of a round came from: the drafter of its node, or the target."""
    if i + 1 >= len(accepted.path):
        return TARGET
    sources = accepted.tree.sources
    return sources[accepted.path[i + 1]] if sources else FIRST


def _drafting(config: DecodeConfig) -> tuple[DecodeConfig, SamplingConfig | None]:
    """What a session is made for: `config` without what may change between two of its turns."""
    same = DecodeConfig()
    lasting = replace(
        config,
        max_tokens=same.max_tokens,
        stop=same.stop,
        prefill_step=same.prefill_step,
        sampling=same.sampling,
    )
    return lasting, config.sampling if draws_drafts(config) else None


def _opening(tokenizer: Any, tokens: list[int]) -> str:
    ends_inside = tokenizer.decode(tokens[-_TAIL:]).rstrip().endswith(BEGIN)
    return BEGIN if ends_inside else ""
