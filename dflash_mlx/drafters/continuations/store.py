"""The texts that drafts of one model may come from, oldest first, in memory and in a file."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_mlx.core.text import amount
from dflash_mlx.drafters.continuations.files import TextFile, newest
from dflash_mlx.drafters.continuations.suffixes import CODE, LONGEST, Match, SuffixArray, Text

LIMIT = 64 * 10**6  # bytes
_A_TOKEN = 8  # bytes
_SMALL = 2**16  # tokens of new texts that are sorted apart from the others
_MANY = 9  # texts that are sorted together, as where a corpus is read in


class Store:
    """What one user and one model have said: `find` looks it up, `add` takes in a text.

    A thread of its own reads the file, sorts and writes; until a text is sorted it is not found.
    Nothing is raised for a file: `problem` says what is wrong with it, and all goes on without.
    """

    def __init__(self, limit: int = LIMIT, file: Path | None = None, owner: str = "") -> None:
        self.problem = ""  # a sentence
        self._limit = limit // _A_TOKEN  # tokens
        self._usual = self._limit * 7 // 8  # of a full store, or it would soon be full again
        self._file = TextFile(file, owner) if file else None
        self._arrays: tuple[SuffixArray, ...] = ()  # the oldest texts first
        self._pending: list[Text] = []
        self._unread = file is not None
        self._thread: threading.Thread | None = None
        self._lock, self._disk = threading.Lock(), threading.Lock()
        self._begun = 0  # how often everything was forgotten
        if file is not None:
            self._start()

    @property
    def nbytes(self) -> int:
        return sum(_A_TOKEN * each.size for each in self._arrays)

    def find(self, suffix: Any) -> list[Match]:
        """Places that match what a text ends with: its last tokens, of CODE, the newest first."""
        return [match for each in self._arrays for match in each.find(suffix)]

    def add(self, tokens: Sequence[int], said: float = 0.0) -> None:
        """Take in a conversation, or what is new of it, of that Unix second, or of now for 0."""
        if not tokens:  # as of one that was given up while it waited
            return
        if len(tokens) > self._usual:
            size, limit = amount(_A_TOKEN * len(tokens)), amount(_A_TOKEN * self._usual)
            self.problem = f"a text of {size} was not kept, as what was said has {limit} in all"
            return
        with self._lock:
            self._pending.append(Text(np.array(tokens, CODE), said or time.time()))
            self._start()

    def forget(self) -> None:
        """Remove all texts, also those on the disk; OSError where the disk says no."""
        with self._disk:
            with self._lock:
                self._arrays, self._pending, self._unread = (), [], False
                self._begun += 1
            if self._file is not None:
                self._file.remove()

    def spare(self) -> None:
        """Let the oldest texts go from memory, most of them; a file has them at the next start."""
        with self._lock:
            self._arrays = self._arrays[1:]

    def wait(self, seconds: float | None = None) -> bool:
        """Until all that was added is found and written; whether it is."""
        if (thread := self._thread) is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="texts", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                texts, self._pending = self._pending, []
                unread, self._unread, begun = self._unread, False, self._begun
                if not texts and not unread:
                    self._thread = None
                    return
            try:
                if unread:
                    self._read(self._limit, begun)
                for some in [[text] for text in texts] if len(texts) < _MANY else [texts]:
                    self._take_in([part for text in some if (part := self._new(text))], begun)
            except Exception as error:  # the edge of a thread; decoding goes on without
                self._tell(error)

    def _read(self, limit: int, begun: int) -> None:
        with self._disk:
            if self._file is None or begun != self._begun:
                return
            try:
                texts, problem = self._file.read(limit)
            except OSError:  # nothing is written to what cannot be read
                self._file = None
                raise
        self.problem = problem or self.problem
        self._publish([SuffixArray(texts)] if texts else [], begun)

    def _take_in(self, texts: list[Text], begun: int) -> None:
        if not texts:
            return
        arrays = [*self._arrays, SuffixArray(texts)]
        while arrays[2:] or (arrays[1:] and not arrays[1].size < _SMALL <= arrays[0].size):
            *arrays, one, other = arrays
            arrays.append(SuffixArray([*one.texts(), *other.texts()]))
        if full := sum(each.size for each in arrays) > self._limit:
            kept = [text for each in arrays for text in each.texts()]
            arrays = [SuffixArray(newest(kept, self._usual))]
        self._publish(arrays, begun)
        with self._disk:
            if self._file is not None and begun == self._begun:
                self._file.append(texts)
                if full:
                    self._file.read(self._usual)

    def _publish(self, arrays: Sequence[SuffixArray], begun: int) -> None:
        with self._lock:
            if begun == self._begun:
                self._arrays = tuple(arrays)

    def _new(self, text: Text) -> Text | None:
        """What of a text does not begin as earlier ones do; None for nothing."""
        tokens, known = text.tokens, 0
        for end in (*range(LONGEST, len(tokens), LONGEST // 2), len(tokens)):
            window = tokens[max(0, end - LONGEST) : end][::-1]
            if not any(each.has(window) for each in self._arrays):
                return Text(tokens[max(0, known - LONGEST) :], text.said)
            known = end
        return None

    def _tell(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or error
        self.problem = f"what was said cannot be kept ({reason})"


def owner_of(name: str, tokenizer: Any) -> str:
    """What the tokens of a text mean: the model that said it, and some of its vocabulary."""
    size = len(tokenizer)
    some = tokenizer.convert_ids_to_tokens([*range(0, size, max(1, size // 64))])
    return hashlib.sha256(repr((name, size, some)).encode()).hexdigest()


class Stores:
    """A store for each model and each user.

    folder: of their files, which the user alone can read; None for in memory alone. limit: bytes of
    each; 0 for none, so that there is only what may be forgotten.
    """

    def __init__(self, folder: Path | None = None, limit: int = LIMIT) -> None:
        self._folder, self._limit = folder, limit
        self._stores: dict[tuple[str, str], Store] = {}

    def of(self, model: str, tokenizer: Any, user: str = "") -> Store | None:
        """The store of a model's name and tokenizer, and of a user (an API key)."""
        if not self._limit:
            return None
        owner = owner_of(model, tokenizer)
        if (key := (owner, user)) not in self._stores:
            name = hashlib.sha256("\n".join(key).encode()).hexdigest()[:24]
            file = self._folder / f"{name}.texts" if self._folder else None
            self._stores[key] = Store(self._limit, file, owner)
        return self._stores[key]

    def spare(self) -> None:
        """Free memory, see `Store`."""
        for store in [*self._stores.values()]:
            store.spare()

    def finish(self, seconds: float) -> str:
        """Wait until all is written; a sentence about what could not be kept or read, or ""."""
        for store in self._stores.values():
            store.wait(seconds)
        return next((store.problem for store in self._stores.values() if store.problem), "")

    def forget(self) -> None:
        """Remove the texts of all models and users, those of other runs of the program too."""
        for store in self._stores.values():
            store.forget()
        for file in self._folder.glob("*.[td]*") if self._folder else ():
            file.unlink(missing_ok=True)
