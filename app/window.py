"""Which messages of a long conversation are on screen as widgets."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Window:
    """Messages start..end-1 of `total`; at most `size` of them, moved by half of that."""

    total: int = 0
    start: int = 0
    size: int = 30

    @property
    def end(self) -> int:
        """One behind the last message shown."""
        return min(self.total, self.start + self.size)

    @property
    def at_end(self) -> bool:
        return self.end == self.total

    def newest(self, total: int) -> Window:
        """The last messages of `total`."""
        return replace(self, total=total, start=max(0, total - self.size))

    def earlier(self) -> Window:
        """Half a window back."""
        return replace(self, start=max(0, self.start - self.size // 2))

    def later(self) -> Window:
        """Half a window forward."""
        last = max(0, self.total - self.size)
        return replace(self, start=min(last, self.start + self.size // 2))
