"""The inputs of a run's story, read once (`RunContext`), among them the states of the code and their diffs (`Code`)."""

from __future__ import annotations

import datetime as dt
import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.ledger import Linked
from autorl_hpc.files.redact import masked
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.safe_open import DriverTotals, read_totals
from autorl_hpc.recorder.code import BY_HASH, LINK, GitDamage, Repository
from autorl_hpc.recorder.traces.totals import TraceTotals, add_up
from autorl_hpc.records.entries import Submission
from autorl_hpc.records.exchange import Engine
from autorl_hpc.records.recorded import CodeRevision, ProcessSeen, TraceEvent
from autorl_hpc.records.run import RunRecord
from autorl_hpc.report.format import clean, clean_code
from autorl_hpc.report.hidden_items import CODE_FOLDER, IN_FILE, NOTHING, Hidden, hidden_of
from autorl_hpc.report.run_story.logs import AgentLog, Recorded, read_events, read_recorded
from autorl_hpc.report.run_story.resources import UsageSeries, answered, attempts_of, failed, usage_of, with_counted
from autorl_hpc.report.scores import PairedItems
from autorl_hpc.report.story_records import Change
from autorl_hpc.report.summary import Point, RunSummary
from autorl_hpc.states import EntryKind

# --- the agent's code at each revision, from code.git, and what changed: counts by file and the beginning of a unified diff,
# cleaned, masked and bounded. A file in which held-out items were found is named but not shown.

MAX_BLOB_BYTES = 1 << 20
MAX_SOURCES, MAX_SOURCE_BYTES = 300, 4 << 20
"""Limits of what is read of one revision to find routes and settings. Shallow files come first, so an agent's own code is read
before a library that it copied."""

# files that are named, and lines that are shown of each; code.git has the whole
MAX_CHANGES, MAX_DIFF_LINES, MAX_LINE_CHARS = 50, 400, 160
SHOWN_A_RUN = 4000  # bound on the lines of diffs that are shown of one run
MAX_TEXT_BYTES = 200_000  # A larger file is data or generated: its lines are counted but not shown
MAX_LINES = 3000  # longest text that is compared by line: difflib then takes at most 0.4 s, even in its worst case
LINES_A_RUN = 300_000  # bound on the lines of changed files that are compared in one run
# suffixes of files that agents write; these are named first
CODE_SUFFIXES = (".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".cfg", ".md")
# marks before the object id of a hash pointer or a link: such ids tell contents apart, but the objects hold no content
BY_HASH_MARK, LINK_MARK = "=", "@"


class CodeChange(NamedTuple):
    """The change from one state of the code to another."""

    changes: tuple[Change, ...] = ()
    more_changes: int = 0


class Code:
    """The states of one run's code. What is damaged or missing is None, and listed in `troubles`."""

    def __init__(
        self, code_git: Path, revisions: Sequence[CodeRevision], hidden: Hidden = NOTHING, lines: int = LINES_A_RUN
    ) -> None:
        self.troubles: dict[str, None] = {}
        self.revisions = sorted(revisions, key=lambda r: r.elapsed_s)
        self._repository = Repository(code_git) if code_git.is_dir() and not code_git.is_symlink() else None
        self._hidden, self._lines_left, self._shown_left = hidden, lines, SHOWN_A_RUN
        self.tree = lru_cache(maxsize=64)(self._tree)

    def at(self, elapsed_s: float) -> str | None:
        """Return the last revision recorded by `elapsed_s`; None if there is none."""
        return next((r.revision for r in reversed(self.revisions) if r.elapsed_s <= elapsed_s), None)

    def _tree(self, revision: str | None) -> Mapping[str, str] | None:
        if revision is None or self._repository is None:
            return None
        try:
            files = self._repository.files(revision)
        except GitDamage as error:
            self.troubles[f"code.git: {error}"] = None
            return None
        found = {}
        for path, (mode, name) in files.items():
            mark = LINK_MARK if mode == LINK else BY_HASH_MARK * path.startswith(BY_HASH)
            found[path.removeprefix(BY_HASH).decode("utf-8", "replace")] = mark + name
        return found

    def blob(self, name: str) -> bytes | None:
        """Return the content of an object; None if it is not kept, too large or damaged."""
        if name.startswith((BY_HASH_MARK, LINK_MARK)) or self._repository is None:
            return None
        try:
            return self._repository.read(name, "blob", MAX_BLOB_BYTES)
        except GitDamage:
            return None

    def sources(self, revision: str | None) -> dict[str, bytes]:
        """Return programs and configurations of a revision, by path relative to code/."""
        tree = self.tree(revision) or {}
        found: dict[str, bytes] = {}
        total = 0
        paths = sorted((p for p in tree if p.endswith(CODE_SUFFIXES)), key=lambda p: (p.count("/"), p))
        for path in paths[:MAX_SOURCES]:
            data = self.blob(tree[path])
            total += len(data or b"")
            if total > MAX_SOURCE_BYTES:
                break
            if data is not None:
                found[path.removeprefix(CODE_FOLDER)] = data
        return found

    def change(self, before: str | None, after: str | None) -> CodeChange:
        """Return the change between two revisions; `before` None means an empty tree."""
        new, old = self.tree(after), self.tree(before) if before is not None else {}
        if new is None or old is None or before == after:
            return CodeChange()
        paths = [path for path in {*old, *new} if old.get(path) != new.get(path)]
        paths.sort(key=lambda path: (not path.endswith(CODE_SUFFIXES), path))
        found = tuple(self.file_change(path, old.get(path), new.get(path)) for path in paths[:MAX_CHANGES])
        return CodeChange(found, max(0, len(paths) - MAX_CHANGES))

    def file_change(self, path: str, old: str | None, new: str | None) -> Change:
        """Return the change of one file.

        Args:
            old, new: object ids; None: the file does not exist.
        """
        what: Literal["added", "changed", "removed"] = "changed"
        if old is None or new is None:
            what = "added" if old is None else "removed"
        name = clean(masked(self._hidden.name(path))) or "(no name)"
        if any(each is not None and self.blob(each) is None for each in (old, new)):
            is_link = LINK_MARK in ((old or "")[:1], (new or "")[:1])
            return Change(path=name, added=0, removed=0, what="link" if is_link else "binary")
        added, removed, lines = self._compare(old, new)
        shown = IN_FILE if self._hidden.file(path) else self._shown(lines)
        return Change(path=name, added=added, removed=removed, what=what, diff=shown)

    def _shown(self, lines: Sequence[str]) -> str | None:
        kept = lines[: min(MAX_DIFF_LINES, self._shown_left)]
        self._shown_left -= len(kept)
        # Masked together, since the line that announces a key may come before the key's own line.
        cleaned = [clean_code(line, MAX_LINE_CHARS) for line in masked("\n".join(kept)).split("\n")]
        more = [f"({len(lines) - len(kept)} more lines)"] if len(lines) > len(kept) else []
        return "\n".join([*cleaned, *more]).strip("\n") or None

    def _compare(self, old: str | None, new: str | None) -> tuple[int, int, list[str]]:
        before, after = (self.blob(name) or b"" if name else b"" for name in (old, new))
        small = max(len(before), len(after)) <= MAX_TEXT_BYTES and self._lines_left > 0
        diff = line_diff(before, after) if small else None
        if diff is not None:
            self._lines_left -= before.count(b"\n") + after.count(b"\n") if old and new else 0
            return diff
        gone, come = Counter(before.split(b"\n")), Counter(after.split(b"\n"))
        return (come - gone).total(), (gone - come).total(), ["(not shown: too much)"]


def line_diff(before: bytes, after: bytes) -> tuple[int, int, list[str]] | None:
    """Return lines added, lines removed, and the hunks of a unified diff; None for texts that are too long."""
    old, new = _text_lines(before.decode("utf-8", "replace")), _text_lines(after.decode("utf-8", "replace"))
    if max(len(old), len(new)) > MAX_LINES:
        return None
    found = list(difflib.unified_diff(old, new, lineterm=""))[2:]
    added, removed = (sum(line.startswith(sign) for line in found) for sign in "+-")
    return added, removed, "\n".join(found).split("\n")


def _text_lines(text: str) -> list[str]:
    """Split at line feeds only; str.splitlines also splits at characters that editors and git don't treat as line ends."""
    *lines, last = text.split("\n")
    return [*lines, f"{last}\n\\ No newline at end of file"] if last else lines


# --- the other inputs of a story


@dataclass(frozen=True)
class RunContext:
    """The inputs of one run's story, each read once.

    Attributes:
        summary: the run's figures, without the story.
        pair_of: returns base model and submission on the feedback items; raises Unusable.
        engine: the scoring engine.
    """

    run: RunDir
    record: RunRecord
    view: RunView
    entries: Sequence[Linked]
    summary: RunSummary
    pair_of: Callable[[Submission], PairedItems]
    engine: Engine | None = None

    @cached_property
    def recorded(self) -> Recorded:
        return read_recorded(self.run)

    @cached_property
    def events(self) -> Sequence[dict[str, Any]]:
        return read_events(self.run.events)

    @cached_property
    def log(self) -> AgentLog:
        return AgentLog(self.run.agent_log, self.run.agent_times)

    @cached_property
    def code(self) -> Code:
        return Code(self.run.code_git, self.recorded.revisions.records, self.hidden)

    @cached_property
    def usage(self) -> UsageSeries:
        samples, attempts = self.recorded.usage, attempts_of(self.view, self.summary.elapsed_s)
        given = {one.attempt: one.gpus for one in self.view.attempts if one.gpus is not None}
        return usage_of(samples.records, attempts, samples.every, given)

    @cached_property
    def counted(self) -> DriverTotals | None:
        """Return what the gateway counted; None if the agent called its driver past the gateway, or never."""
        return read_totals(self.run.driver_log)

    @cached_property
    def spent(self) -> TraceTotals:
        """Return the driver's cost and the active times of driver and tools: as the gateway counted, else as the trace says."""
        told = add_up(self.recorded.trace.records, self.summary.elapsed_s if self.view.sealed else None)
        return with_counted(told, self.counted)

    @property
    def points(self) -> Sequence[Point]:
        return self.summary.trajectory

    @property
    def base(self) -> float | None:
        """Return the base model's feedback score in points; None if unknown."""
        return self.summary.baseline_feedback.score if self.summary.baseline_feedback else None

    @property
    def chosen(self) -> int | None:
        """Return the submission that stands for the run: the selected one, else the best so far."""
        best = self.view.best()
        return self.summary.selected if self.summary.selected is not None else best.submission_id if best else None

    @cached_property
    def hidden(self) -> Hidden:
        return hidden_of(self.view.contaminations)

    @cached_property
    def commands(self) -> Sequence[ProcessSeen | TraceEvent]:
        seen: list[ProcessSeen | TraceEvent] = [p for p in self.recorded.processes.records if p.what == "began"]
        seen += [e for e in self.recorded.trace.records if e.kind == "tool_call" and e.command]
        return sorted(seen, key=lambda one: one.elapsed_s)

    @cached_property
    def failed_programs(self) -> Sequence[ProcessSeen]:
        """Return the agent's programs that ended with an error, in order."""
        return sorted(filter(failed, self.recorded.processes.records), key=lambda p: p.elapsed_s)

    @cached_property
    def failed_calls(self) -> Sequence[TraceEvent]:
        """Return tool results that failed according to the trace, with their commands, in order."""
        results = sorted(answered(self.recorded.trace.records), key=lambda e: e.elapsed_s)
        return [e for e in results if e.exit_code or (e.exit_code is None and e.ok is False)]

    @cached_property
    def waits(self) -> Mapping[int, float]:
        """Return seconds from each submission's entry to its score's, by number; two nodes' clocks may differ by some seconds."""
        at: dict[EntryKind, dict[int, dt.datetime]] = {EntryKind.SUBMISSION: {}, EntryKind.SCORE: {}}
        for entry in self.entries:
            if entry.kind in at:
                at[entry.kind].setdefault(entry.body.submission_id, dt.datetime.fromisoformat(entry.at))
        taken, scored = at.values()
        return {n: max(0.0, (scored[n] - taken[n]).total_seconds()) for n in scored if n in taken}

    @cached_property
    def score_entries(self) -> Mapping[int, int]:
        """Return the number of the ledger entry that scored each submission."""
        scores = [(i, e.body) for i, e in enumerate(self.entries, 1) if e.kind is EntryKind.SCORE]
        return {body.submission_id: number for number, body in reversed(scores)}
