"""Several sites' trees in one report: what each is called."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from autorl_hpc.report.text import clean

MAX_CHARS = 40
"""A site's name stands in a column."""


def sites_of(runs: Iterable[Path]) -> dict[Path, str]:
    """Names of the runs/ folders in which these runs lie (`runs/<experiment>/<run_id>`), empty if it is one alone.

    A name is what the folders' paths don't share: `alps/runs` and `jean-zay/runs` are called alps and jean-zay.
    """
    roots = sorted({run.parent.parent for run in runs})
    if len(roots) < 2:
        return {}
    parts = [root.parts for root in roots]
    begin, end = _common(parts), _common([one[::-1] for one in parts])
    names = [clean("/".join(_own(root.parts, begin, end)), MAX_CHARS) or "(no name)" for root in roots]
    places = {root: names[:at].count(names[at]) for at, root in enumerate(roots)}  # long names were cut
    return {
        root: f"{name} ({places[root] + 1})" if places[root] else name for root, name in zip(roots, names, strict=True)
    }


def _own(parts: tuple[str, ...], begin: int, end: int) -> tuple[str, ...]:
    """The parts that are a path's own; the last one where all of it is shared, as in `a` and `a/a`."""
    return parts[begin : len(parts) - end] or parts[-1:]


def _common(several: list[tuple[str, ...]]) -> int:
    """How many parts all of them begin with."""
    return next(
        (i for i, level in enumerate(zip(*several, strict=False)) if len(set(level)) > 1), min(map(len, several))
    )
