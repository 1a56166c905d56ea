"""A `Progress` that remembers what it was told."""

from pullback.runs.progress import Progress


class Heard(Progress):
    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.counts: dict[str, list[int]] = {}
        self.current = ""

    def work(self, what: str, total: int, unit: str, done: int = 0) -> None:
        self.current = what
        self.totals[what], self.counts[what] = total, [done] if done else []

    def advance(self, count: int) -> None:
        self.counts[self.current].append(count)
