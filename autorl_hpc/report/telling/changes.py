"""What changed in the agent's code between two of its states: counts by file, and the beginning of a unified diff.

Shown for people: cleaned, masked and bounded. A file in which held-out items were found is named and not shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from autorl_hpc.files.linediff import Work, line_diff
from autorl_hpc.files.masking import masked
from autorl_hpc.report.hiding import IN_FILE, NOTHING, Hidden
from autorl_hpc.report.story import Change
from autorl_hpc.report.text import clean, clean_code

MAX_CHANGES = 50
"""Files that are named; an agent that unpacks a library into its code would fill the page."""

MAX_DIFF_LINES = 120
"""About two screens: what an iteration changed is most often less, and the whole lies in code.git."""

MAX_LINE_CHARS = 160
MAX_TEXT_BYTES = 200_000
"""A larger file is data, or made by a program: its lines are counted and not shown."""

CODE_SUFFIXES = (".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".cfg", ".md")
"""Named first: what an agent writes."""

Files = Mapping[str, "bytes | None"]
"""By path in the workspace; None: only its hash is known, it is a link, or it is binary."""


class CodeChange(NamedTuple):
    """One step of the code."""

    changes: tuple[Change, ...] = ()
    more_changes: int = 0
    diff: str | None = None


class _FileChange(NamedTuple):
    change: Change
    lines: list[str]


class Differ:
    """Compares states of one run's code; a pair of contents is compared once."""

    def __init__(self, hidden: Hidden = NOTHING) -> None:
        """`hidden`: what must not be shown."""
        self._hidden = hidden
        self._work = Work()
        self._known: dict[tuple[bytes | None, bytes | None], tuple[int, int, list[str]]] = {}

    def between(
        self, old: Files, new: Files, changed: Collection[str] | None = None, links: Collection[str] = ()
    ) -> CodeChange:
        """Changes from `old` to `new`.

        Args:
            changed: paths that may differ, where it is known; else all of them are looked at.
            links: paths that are links, before or after.
        """
        paths = [path for path in (changed if changed is not None else {*old, *new}) if _differs(path, old, new)]
        paths.sort(key=lambda path: (not path.endswith(CODE_SUFFIXES), path))
        found = [self._file(path, old, new, path in links) for path in paths[:MAX_CHANGES]]
        return CodeChange(tuple(one.change for one in found), max(0, len(paths) - MAX_CHANGES), _joined(found))

    def _file(self, path: str, old: Files, new: Files, is_link: bool) -> _FileChange:
        is_old, is_new = path in old, path in new
        before, after = old.get(path), new.get(path)
        what = "changed" if is_old and is_new else "added" if is_new else "removed"
        name = clean(masked(self._hidden.name(path))) or "(no name)"
        if (is_old and before is None) or (is_new and after is None):
            return _FileChange(Change(path=name, added=0, removed=0, what="link" if is_link else "binary"), [])
        added, removed, lines = self._texts(before, after)
        if self._hidden.file(path):
            lines = [IN_FILE]
        head = [f"--- {name if is_old else 'nothing'}", f"+++ {name if is_new else 'nothing'}"]
        return _FileChange(Change(path=name, added=added, removed=removed, what=what), [*head, *lines])

    def _texts(self, before: bytes | None, after: bytes | None) -> tuple[int, int, list[str]]:
        key = (before, after)
        if key not in self._known:
            self._known[key] = _compared(before or b"", after or b"", self._work)
        return self._known[key]


def _differs(path: str, old: Files, new: Files) -> bool:
    if path in old and path in new:
        return old[path] is None or old[path] != new[path]
    return path in old or path in new


def _compared(before: bytes, after: bytes, work: Work) -> tuple[int, int, list[str]]:
    """Lines added and removed, and the diff."""
    old, new = before.decode("utf-8", "replace"), after.decode("utf-8", "replace")
    if work.steps <= 0 or max(len(before), len(after)) > MAX_TEXT_BYTES:
        gone, come = Counter(old.splitlines()), Counter(new.splitlines())
        return (come - gone).total(), (gone - come).total(), ["(not shown: too much)"]
    found = line_diff(old, new, work)
    return found.added, found.removed, found.text.removesuffix("\n").split("\n")


def _joined(found: Sequence[_FileChange]) -> str | None:
    """The beginning of the whole diff; what is left out is said."""
    kept: list[str] = []
    total = sum(len(one.lines) for one in found)
    for one in found:
        kept += one.lines[: max(0, MAX_DIFF_LINES - len(kept))]
        if len(kept) >= MAX_DIFF_LINES:
            break
    if not kept:
        return None
    # Masked together: a key may be announced on one line and stand on the next, and a mask ends at a line's end.
    shown = [clean_code(line, MAX_LINE_CHARS) for line in masked("\n".join(kept)).split("\n")]
    if total > len(kept):
        shown.append(f"({total - len(kept)} more lines)")
    return "\n".join(shown)
