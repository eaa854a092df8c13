"""A list of figures: each is printed as soon as it is known, all of them as one table at the end, and kept as JSON all along."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LABEL_CHARS = 66


@dataclass(frozen=True)
class Figure:
    """One line.

    Attributes:
        of: the subcommand.
        what: in words.
        value: None: not measured, and `note` says why.
        low, high, n: smallest and largest of the values whose median `value` is, and their number.
        target: in words; None: there is none.
        reached: None: there is no target, or no value.
    """

    of: str
    what: str
    value: float | str | None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int = 1
    target: str | None = None
    reached: bool | None = None
    note: str = ""

    def cells(self) -> tuple[str, str, str, str]:
        """What, figure, target, note."""
        if self.value is None:
            return self.what, "not measured", self.target or "", self.note
        text = f"{_plain(self.value)} {self.unit}".rstrip()
        if self.n > 1 and self.low is not None and self.high is not None:
            text += f" ({_plain(self.low)} to {_plain(self.high)}, n {self.n})"
        verdict = {True: "reached", False: "NOT reached", None: ""}[self.reached]
        target = f"{self.target}: {verdict}" if self.target and verdict else self.target or ""
        return self.what, text, target, self.note


def _plain(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class Figures:
    """Prints, and writes the JSON file anew after each figure, so that a run that is cut short leaves what it knew.

    Args:
        path: of the JSON file; None: none is written.
        about: what stands over the figures: machine, versions, options.
    """

    def __init__(self, path: Path | None, about: dict[str, object]) -> None:
        self.path, self.about = path, about
        self.figures: list[Figure] = []
        self.of = ""
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """A line about the progress, with the seconds since the beginning."""
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", flush=True)

    def add(self, figure: Figure) -> None:
        """One more figure."""
        self.figures.append(figure)
        what, text, target, note = figure.cells()
        rest = "; ".join(part for part in (f"target {target}" if target else "", note) if part)
        self.say(f"{what:<{LABEL_CHARS}} {text}{f'   [{rest}]' if rest else ''}")
        self.write()

    def show(
        self,
        what: str,
        values: float | str | Sequence[float],
        unit: str = "",
        *,
        below: float | None = None,
        above: float | None = None,
        note: str = "",
    ) -> float:
        """Adds the median of the values, against a target if one is given, and returns it (0 for a text)."""
        several = [values] if isinstance(values, (int, float, str)) else list(values)
        if isinstance(values, str) or not several:
            self.add(Figure(self.of, what, values if isinstance(values, str) else None, unit, note=note))
            return 0.0
        numbers = [float(value) for value in several]
        middle = statistics.median(numbers)
        target = f"< {below:g}" if below is not None else f">= {above:g}" if above is not None else None
        reached = middle < below if below is not None else middle >= above if above is not None else None
        self.add(
            Figure(
                self.of,
                what,
                middle,
                unit,
                low=min(numbers),
                high=max(numbers),
                n=len(numbers),
                target=None if target is None else f"{target} {unit}".rstrip(),
                reached=reached,
                note=note,
            )
        )
        return middle

    def missing(self, what: str, why: str) -> None:
        """A figure that could not be measured."""
        self.add(Figure(self.of, what, None, note=why))

    def write(self) -> None:
        """The JSON file, whole or not at all."""
        if self.path is None:
            return
        value = {"about": self.about, "figures": [asdict(figure) for figure in self.figures]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f".{self.path.name}.part")
        part.write_text(json.dumps(value, indent=1) + "\n")
        part.replace(self.path)

    def table(self) -> str:
        """All figures as a table of Markdown."""
        lines = ["| of | what | figure | target | note |", "|---|---|---|---|---|"]
        lines += [f"| {figure.of} | {' | '.join(figure.cells())} |" for figure in self.figures]
        return "\n".join(lines)
