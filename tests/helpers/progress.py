"""A `Progress` that remembers what it was told."""

from pullback.runs.progress import Progress


class Heard(Progress):
    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.counts: dict[str, list[int]] = {}
        self.current = ""

    def work(self, what: str, total: int, unit: str) -> None:
        self.current = what
        self.totals[what], self.counts[what] = total, []

    def advance(self, count: int) -> None:
        self.counts[self.current].append(count)
