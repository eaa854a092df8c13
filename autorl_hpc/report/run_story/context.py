"""The inputs of a run's story, read once (`RunContext`): code states and their diffs, jobs, nodes, versions, waits, failures."""

from __future__ import annotations

import datetime as dt
import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.redact import masked
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.safe_open import DriverTotals, read_totals
from autorl_hpc.recorder.code import BY_HASH, LINK, GitDamage, Repository
from autorl_hpc.recorder.traces.totals import Span, TraceTotals, add_up
from autorl_hpc.records.entries import Contamination, Submission, Writer
from autorl_hpc.records.exchange import Engine
from autorl_hpc.records.recorded import CodeRevision, ProcessSeen, TraceEvent
from autorl_hpc.records.run import RunRecord
from autorl_hpc.report.format import clean, clean_code
from autorl_hpc.report.hidden_items import CODE_FOLDER, IN_FILE, NOTHING, Hidden, hidden_of
from autorl_hpc.report.run_story.logs import AgentLog, Recorded, read_events, read_recorded
from autorl_hpc.report.run_story.resources import UsageSeries, attempts_of, failed, usage_of, with_counted
from autorl_hpc.report.scores import PairedItems
from autorl_hpc.report.story_records import AGENT_PROGRAM, CHANGED, Change
from autorl_hpc.report.summary import Point, RunSummary
from autorl_hpc.states import EntryKind

# --- changes of the agent's code: counts by file and the beginning of a unified diff
# Cleaned, masked and bounded. A file in which held-out items were found is named but not shown.

MAX_CHANGES = 50
"""Files that are named; an agent that unpacks a library into its code changes thousands."""

MAX_DIFF_LINES = 120
"""About two screens: most iterations change less, and code.git has the whole."""

MAX_LINE_CHARS = 160
MAX_TEXT_BYTES = 200_000
"""A larger file is data or generated: its lines are counted but not shown."""

MAX_LINES = 3000
"""Longest text that is compared by line: difflib then takes at most 0.4 s, even in its worst case."""

LINES_A_RUN, LEAST_LINES = 100_000, 300
"""Bound on lines compared per run, without common first and last lines; each pair counts as at least LEAST_LINES."""

CODE_SUFFIXES = (".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".cfg", ".md")
"""Suffixes of files that agents write; these are named first."""

Files = Mapping[str, "bytes | None"]
"""Content by path in the workspace; None: only its hash is kept, or it is a link, or binary."""


class CodeChange(NamedTuple):
    """The change from one state of the code to another."""

    changes: tuple[Change, ...] = ()
    more_changes: int = 0
    diff: str | None = None


class _FileChange(NamedTuple):
    change: Change
    lines: list[str]


class Differ:
    """Compare states of one run's code; each pair of contents is compared once."""

    def __init__(self, hidden: Hidden = NOTHING, lines: int = LINES_A_RUN) -> None:
        """Set what must not be shown (`hidden`) and the bound on compared lines (`lines`)."""
        self._hidden = hidden
        self._lines_left = lines
        self._known: dict[tuple[bytes | None, bytes | None], tuple[int, int, list[str]]] = {}

    def between(
        self, old: Files, new: Files, changed: Collection[str] | None = None, links: Collection[str] = ()
    ) -> CodeChange:
        """Return the changes from `old` to `new`.

        Args:
            changed: paths that may differ; None: compare all.
            links: paths that are links before or after.
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
            self._known[key] = self._compared(before or b"", after or b"")
        return self._known[key]

    def _compared(self, before: bytes, after: bytes) -> tuple[int, int, list[str]]:
        """Return the numbers of lines added and removed, and the diff."""
        old, new = text_lines(before.decode("utf-8", "replace")), text_lines(after.decode("utf-8", "replace"))
        small = max(len(old), len(new)) <= MAX_LINES and max(len(before), len(after)) <= MAX_TEXT_BYTES
        if small and old and new:
            same = _begin_alike(old, new) + _begin_alike(old[::-1], new[::-1])
            self._lines_left -= max(LEAST_LINES, len(old) + len(new) - 2 * same)
        if not small or self._lines_left < 0:
            gone, come = Counter(old), Counter(new)
            return (come - gone).total(), (gone - come).total(), ["(not shown: too much)"]
        return line_diff(old, new)


def _differs(path: str, old: Files, new: Files) -> bool:
    if path in old and path in new:
        return old[path] is None or old[path] != new[path]
    return path in old or path in new


def _begin_alike(old: Sequence[str], new: Sequence[str]) -> int:
    """Return how many first lines are equal."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((number for number, (left, right) in pairs if left != right), min(len(old), len(new)))


def text_lines(text: str) -> list[str]:
    """Split at line feeds only; str.splitlines also splits at characters that editors and git don't treat as line ends."""
    *lines, last = text.split("\n")
    return [*lines, f"{last}\n\\ No newline at end of file"] if last else lines


def line_diff(old: Sequence[str], new: Sequence[str]) -> tuple[int, int, list[str]]:
    """Return lines added, lines removed, and the hunks of a unified diff."""
    found = list(difflib.unified_diff(old, new, lineterm=""))[2:]
    added, removed = (sum(line.startswith(sign) for line in found) for sign in "+-")
    return added, removed, "\n".join(found).split("\n")


def _joined(found: Sequence[_FileChange]) -> str | None:
    """Return the beginning of the whole diff with the number of lines left out; None if there is none."""
    kept: list[str] = []
    total = sum(len(one.lines) for one in found)
    for one in found:
        kept += one.lines[: max(0, MAX_DIFF_LINES - len(kept))]
        if len(kept) >= MAX_DIFF_LINES:
            break
    if not kept:
        return None
    # Masked together, since the line that announces a key may come before the key's own line.
    shown = [clean_code(line, MAX_LINE_CHARS) for line in masked("\n".join(kept)).split("\n")]
    if total > len(kept):
        shown.append(f"({total - len(kept)} more lines)")
    return "\n".join(shown)


# --- the agent's code at each revision, from code.git; contents are read on demand

MAX_BLOB_BYTES = 1 << 20
"""No program is larger than a megabyte; the recorder keeps larger files by hash anyway."""

BY_HASH_MARK, LINK_MARK = "=", "@"
"""Marks before the object id of a hash pointer or a link: such ids tell contents apart, but the objects hold no content."""

MAX_CACHED_BYTES = 32 << 20
MAX_SOURCES = 300
MAX_SOURCE_BYTES = 4 << 20
"""Limits of what is read of one revision to find routes and settings. Shallow files come first, so an agent's own code is read
before a library that it copied."""


class Code:
    """The states of one run's code. Damaged or missing parts are None and are listed in `troubles`."""

    def __init__(self, code_git: Path, revisions: Sequence[CodeRevision], differ: Differ) -> None:
        self.troubles: list[str] = []
        self.revisions = sorted(revisions, key=lambda r: r.elapsed_s)
        self._repository = Repository(code_git) if code_git.is_dir() and not code_git.is_symlink() else None
        self._trees: dict[str, dict[str, str] | None] = {}
        self._blobs: dict[str, bytes | None] = {}
        self._cached_bytes = 0
        self._differ = differ

    def at(self, elapsed_s: float) -> str | None:
        """Return the last revision recorded by `elapsed_s`; None if there is none."""
        found = None
        for revision in self.revisions:
            if revision.elapsed_s > elapsed_s:
                break
            found = revision.revision
        return found

    def tree(self, revision: str | None) -> Mapping[str, str] | None:
        """Return object ids by path in the workspace, marked if no content is kept (large, binary, links); None if unreadable."""
        if revision is None or self._repository is None:
            return None
        if revision not in self._trees:
            try:
                files = self._repository.files(revision)
                self._trees[revision] = dict(_placed(path, mode, name) for path, (mode, name) in files.items())
            except GitDamage as error:
                self._trees[revision] = None
                self.troubles.append(f"code.git: {error}")
        return self._trees[revision]

    def blob(self, name: str) -> bytes | None:
        """Return the content of an object; None if it is not kept, too large or damaged."""
        if name.startswith((BY_HASH_MARK, LINK_MARK)):
            return None
        if name not in self._blobs:
            assert self._repository is not None
            try:
                data: bytes | None = self._repository.read(name, "blob", MAX_BLOB_BYTES)
            except GitDamage:
                data = None
            self._cached_bytes += len(data or b"")
            if self._cached_bytes > MAX_CACHED_BYTES:
                self._blobs.clear()
                self._cached_bytes = len(data or b"")
            self._blobs[name] = data
        return self._blobs[name]

    def sources(self, revision: str | None) -> dict[str, bytes]:
        """Return programs and configurations of a revision, by path relative to code/."""
        tree = self.tree(revision)
        if tree is None:
            return {}
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
        changed = [path for path in {*old, *new} if old.get(path) != new.get(path)]
        links = {path for path in changed for tree in (old, new) if tree.get(path, "").startswith(LINK_MARK)}
        return self._differ.between(
            {path: self.blob(old[path]) for path in changed if path in old},
            {path: self.blob(new[path]) for path in changed if path in new},
            changed,
            links,
        )


def _placed(path: bytes, mode: int, name: str) -> tuple[str, str]:
    """Return path and object id of one file; the id is marked if the object is a pointer."""
    mark = LINK_MARK if mode == LINK else BY_HASH_MARK if path.startswith(BY_HASH) else ""
    return path.removeprefix(BY_HASH).decode("utf-8", "replace"), mark + name


# --- jobs, nodes, versions and waits of a run, from its ledger


class Written(Protocol):
    """The parts of a ledger entry that are needed here."""

    @property
    def kind(self) -> EntryKind: ...
    @property
    def at(self) -> str: ...
    @property
    def writer(self) -> Writer: ...
    @property
    def body(self) -> Any: ...


AGENT_VERSION = "agent_version"
"""The event with the version that the agent's program printed, once per attempt."""

MAX_VERSIONS = 4
MAX_NAMED = 40
"""Limit for jobs, nodes and models; of a run that was requeued for weeks the last ones are shown."""


def jobs_of(entries: Sequence[Written]) -> tuple[str, ...]:
    """Return each job that wrote into the ledger, in order: `supervisor 123_4`, `grader 456`."""
    return _named(f"{writer.role} {writer.job_id}" for writer in _writers(entries) if writer.job_id)


def nodes_of(entries: Sequence[Written]) -> tuple[str, ...]:
    """Return each role's nodes, in order: `supervisor on node7`."""
    return _named(f"{writer.role} on {writer.host}" for writer in _writers(entries) if writer.host)


def _writers(entries: Sequence[Written]) -> Iterable[Writer]:
    """Return who wrote the entries, in order. Hundreds of entries share one writer object; each is returned once."""
    return {id(e.writer): e.writer for e in entries}.values()


def _named(names: Iterable[str]) -> tuple[str, ...]:
    distinct = list(dict.fromkeys(clean(name) or "" for name in names))
    return tuple(distinct[-MAX_NAMED:])


def versions_of(
    record: RunRecord,
    engine: Engine | None,
    trace: Sequence[TraceEvent],
    events: Sequence[Mapping[str, Any]] = (),
    hidden: Hidden = NOTHING,
) -> dict[str, str]:
    """Return versions of the suite, its environment, the scoring engine and the agent's program, and the model in its trace.

    Args:
        events: lines of events.jsonl.
    """
    found = {clean(name) or "": clean(value) or "" for name, value in sorted(record.versions.items())}
    if engine is not None:
        found["engine"] = clean(f"{engine.backend}, {engine.dtype} on {engine.device}") or ""
        found |= {f"engine: {clean(name)}": clean(value) or "" for name, value in sorted(engine.versions.items())}
    told = [e["version"] for e in events if e["event"] == AGENT_VERSION and isinstance(e.get("version"), str)]
    if told:
        named = CHANGED.join(list(dict.fromkeys(told))[-MAX_VERSIONS:])
        found[AGENT_PROGRAM] = clean(hidden.said(masked(f"{record.science.agent} {named}"))) or ""
    models = sorted({event.model for event in trace if event.model})
    if models:
        found["driver's model, by the trace"] = clean(hidden.said(masked(", ".join(models)))) or ""
    formats = sorted({event.format for event in trace} - {""})
    if formats:
        found["trace"] = clean(", ".join(formats)) or ""
    return found


def waits_of(entries: Sequence[Written]) -> dict[int, float]:
    """Return seconds from each submission's entry to its score's, by number.

    The wall clocks of two nodes may differ by some seconds; the waits are shown only.
    """
    taken: dict[int, str] = {}
    waits: dict[int, float] = {}
    for linked in entries:
        if linked.kind is EntryKind.SUBMISSION:
            taken.setdefault(linked.body.submission_id, linked.at)
        elif linked.kind is EntryKind.SCORE and linked.body.submission_id in taken:
            seconds = _between(taken[linked.body.submission_id], linked.at)
            if seconds is not None:
                waits.setdefault(linked.body.submission_id, max(0.0, seconds))
    return waits


def _between(begin: str, end: str) -> float | None:
    try:
        return (dt.datetime.fromisoformat(end) - dt.datetime.fromisoformat(begin)).total_seconds()
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True)
class RunContext:
    """The inputs of one run's story.

    Attributes:
        summary: the run's figures, without the story.
        pair_of: returns base model and submission on the feedback items; raises Unusable.
        engine: the scoring engine.
    """

    run: RunDir
    record: RunRecord
    view: RunView
    entries: Sequence[Written]
    summary: RunSummary
    pair_of: Callable[[Submission], PairedItems]
    engine: Engine | None = None

    @cached_property
    def recorded(self) -> Recorded:
        """Return what the recorder wrote."""
        return read_recorded(self.run)

    @cached_property
    def events(self) -> Sequence[dict[str, Any]]:
        """Return the lines of events.jsonl."""
        return read_events(self.run.events)

    @cached_property
    def log(self) -> AgentLog:
        """Return agent.log."""
        return AgentLog(self.run.agent_log, self.run.agent_times)

    @cached_property
    def code(self) -> Code:
        """Return the agent's code."""
        differ = Differ(self.hidden)
        return Code(self.run.code_git, self.recorded.revisions.records, differ)

    @cached_property
    def attempts(self) -> Mapping[int, Span]:
        """Return when each attempt ran."""
        return attempts_of(self.view, self.summary.elapsed_s)

    @cached_property
    def usage(self) -> UsageSeries:
        """Return the usage samples, merged."""
        samples = self.recorded.usage
        return usage_of(samples.records, self.attempts, samples.every)

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
        """Return every submission."""
        return self.summary.trajectory

    @cached_property
    def hidden(self) -> Hidden:
        """Return what must not be shown."""
        return hidden_of(self.view.contaminations)

    @cached_property
    def commands(self) -> Sequence[ProcessSeen | TraceEvent]:
        """Return observed command lines in order."""
        seen: list[ProcessSeen | TraceEvent] = [p for p in self.recorded.processes.records if p.what == "began"]
        seen += [e for e in self.recorded.trace.records if e.kind == "tool_call" and e.command]
        return sorted(seen, key=lambda one: one.elapsed_s)

    @cached_property
    def failed_programs(self) -> Sequence[ProcessSeen]:
        """Return the agent's programs that ended with an error, in order."""
        return sorted((p for p in self.recorded.processes.records if failed(p)), key=lambda p: p.elapsed_s)

    @cached_property
    def waits(self) -> Mapping[int, float]:
        """Return seconds from each submission's entry to its score's."""
        return waits_of(self.entries)

    @cached_property
    def failed_calls(self) -> Sequence[tuple[TraceEvent, str]]:
        """Return tool results that failed according to the trace, with their commands, in order."""
        commands = {e.call_id: e.command for e in self.recorded.trace.records if e.kind == "tool_call" and e.command}
        results = [e for e in self.recorded.trace.records if e.kind == "tool_result"]
        failed_ones = [e for e in results if e.exit_code not in (0, None) or (e.exit_code is None and e.ok is False)]
        told = [(e, e.command or commands.get(e.call_id) or "") for e in failed_ones]
        return sorted(told, key=lambda pair: pair[0].elapsed_s)

    @cached_property
    def looks_at(self) -> Mapping[int | None, Sequence[Contamination]]:
        """Return the contamination looks by submission."""
        found: dict[int | None, list[Contamination]] = {}
        for look in self.view.contaminations:
            found.setdefault(look.submission_id, []).append(look)
        return found

    @cached_property
    def score_entries(self) -> Mapping[int, int]:
        """Return the number of the ledger entry that scored each submission."""
        scores = [(i, e.body) for i, e in enumerate(self.entries, 1) if e.kind is EntryKind.SCORE]
        return {body.submission_id: number for number, body in reversed(scores)}
