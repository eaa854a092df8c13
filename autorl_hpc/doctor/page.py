"""The page on a terminal: one line a finding, and what follows from those that are not ok. Made for 80 columns and more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from autorl_hpc.doctor.finding import Finding, State

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

STYLES = {
    State.OK: "green",
    State.NOTE: "cyan",
    State.WARNING: "yellow",
    State.PROBLEM: "bold red",
    State.UNKNOWN: "magenta",
}
STATE_WIDTH = 8
CHECK_WIDTH = 26
LEAST_WIDTH = 60


def show(findings: Sequence[Finding], console: Console) -> None:
    """Prints the groups in their order, and a count at the end."""
    from rich.text import Text

    group = None
    for finding in findings:
        if finding.group != group:
            console.print(Text(finding.group if group is None else f"\n{finding.group}", style="bold"), soft_wrap=True)
            group = finding.group
        for line in _lines(finding, max(console.width, LEAST_WIDTH)):
            console.print(line, soft_wrap=True)
    console.print(Text(f"\n{count(findings)}", style="bold"), soft_wrap=True)


def _lines(finding: Finding, width: int) -> list[Text]:
    from rich.text import Text

    state = (f"{finding.state:<{STATE_WIDTH}}", STYLES[finding.state])
    first = f"{finding.check:<{CHECK_WIDTH}}"
    if not first.endswith(" "):
        first += " "  # a long name pushes its value to the right
    wrapped = _wrapped(first + finding.value, width - STATE_WIDTH, CHECK_WIDTH)
    lines = [Text.assemble(state, wrapped[0]), *(Text(" " * STATE_WIDTH + line) for line in wrapped[1:])]
    if finding.state is not State.OK:
        for label, words in (("so what: ", finding.so_what), ("do this: ", finding.do_this)):
            rows = _wrapped(words, width - STATE_WIDTH - len(label), 0) if words else []
            for number, row in enumerate(rows):
                head = " " * STATE_WIDTH + (label if number == 0 else " " * len(label))
                lines.append(Text.assemble((head, "dim"), row))
    return lines


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    """Spaces stand as they are: the first ones make a column."""
    rows = wrap(text, width, subsequent_indent=" " * indent, drop_whitespace=True, break_on_hyphens=False)
    return [row.rstrip() for row in rows] or [""]


def count(findings: Sequence[Finding]) -> str:
    """Such as `31 ok, 4 notes, 1 warning, 0 problems, 2 unknown`."""
    numbers = Counter(finding.state for finding in findings)
    plural = {State.NOTE, State.WARNING, State.PROBLEM}
    return ", ".join(
        f"{numbers[state]} {state}{'s' if state in plural and numbers[state] != 1 else ''}" for state in State
    )
