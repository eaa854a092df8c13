"""Print the merged report as a table, a comparison, or a run's logs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autorl_hpc.cluster.job_table import read_submitted
from autorl_hpc.errors import AutorlError, visible
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import jobs_of
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger, heads_of
from autorl_hpc.files.redact import masked
from autorl_hpc.files.safe_open import open_plain
from autorl_hpc.records.exchange import RunHead
from autorl_hpc.report import format as fmt
from autorl_hpc.report.find import nothing_in, runs_of, sites_of
from autorl_hpc.report.format import clean_code
from autorl_hpc.report.pages import answers, gain_in_words, outcome
from autorl_hpc.report.run_page import sentence
from autorl_hpc.report.summary import MergedReport, OverRuns, RunSummary

if TYPE_CHECKING:
    from rich.console import Console

    from autorl_hpc.report.versus import Versus

MAX_ROWS = 200  # bound on rows: rich needs a second for a thousand
MAX_SILENT = 20  # runs without a submission whose end is told


def print_summary(merged: MergedReport, console: Console, where: Path) -> None:
    """Print the answers, the runs, the means over runs, what was left out, and the report's path. `where`: the path of index.html."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    for told in answers(merged):
        console.print(Text(told), style="bold")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in COLUMNS:
        side: Any = "left" if name in ("task", "agent", "outcome") else "right"
        table.add_column(name, justify=side, no_wrap=name not in ("agent", "outcome"), overflow="fold")
    for run in merged.runs[:MAX_ROWS]:
        table.add_row(*map(Text, _cells(run)))
    console.print(table)
    if len(merged.runs) > MAX_ROWS:
        console.print(Text(f"and {len(merged.runs) - MAX_ROWS:,} more runs: in index.html and summary.csv"))
    silent = [run for run in merged.runs if run.ended_by is not None and not run.accepted]
    for run in silent[:MAX_SILENT]:
        console.print(Text(run.run_id), soft_wrap=True)
        console.print(Padding(Text(sentence(run), style="yellow"), (0, 0, 0, 2), expand=False))
    if len(silent) > MAX_SILENT:
        console.print(Text(f"and {len(silent) - MAX_SILENT:,} more runs without a submission"))
    for line in _cell_lines(merged):
        console.print(Text(line))
    left_out = [f"left out: {left.what}: {left.why}" for left in merged.left_out]
    for line in (*merged.notes, *left_out):
        console.print(Text(line, style="yellow"))
    for line in head_lines(merged):
        console.print(Text(line, style="dim"))
    if merged.paper is not None:
        console.print(Text("the paper's published results (another protocol and engine) are on the page"))
    for why in sorted({_decides(run) for run in merged.runs} - {""}):
        console.print(Text(f"where interval and p contradict each other, {why}"))
    console.print(Text("Points; intervals are 95 %, of items. report: of the selected checkpoint on the report split."))
    console.print(Text(f"report: {visible(os.fsencode(where).decode('utf-8', 'backslashreplace'))}"), soft_wrap=True)


COLUMNS = ("task", "agent", "seed", "report", "improvement", "p", "outcome")


def _cells(run: RunSummary) -> list[str]:
    agent = [run.agent, *([run.driver] if run.driver != "none" else []), *([run.mode] if run.mode != "free" else [])]
    report = run.report if run.selected is not None else None  # the base model's score does not belong to a checkpoint
    p = f"{fmt.p_value(run.improvement.p_value if run.improvement else None)}{' decides' * bool(_decides(run))}"
    score = fmt.points(report.score if report else None)
    return [run.task, " ".join(agent), str(run.seed), score, gain_in_words(run.improvement), p, outcome(run)]


def _decides(run: RunSummary) -> str:
    gain = run.improvement
    return "" if gain is None else fmt.decides(gain.p_value, gain.low, gain.high)


def print_comparison(versus: Versus, console: Console, folder: Path) -> None:
    """Print a comparison, a paragraph a task. `folder`: contains compare.html."""
    from rich.text import Text

    sides = (("A", versus.a), ("B", versus.b))
    lines = [versus.verdict()]
    lines += [f"{name}: {side.name} ({side.counted} of {side.runs} runs counted)" for name, side in sides]
    for one in versus.tasks:
        p = [f"p {fmt.p_value(one.p_value)}", f"Holm {fmt.p_value(one.p_holm)}"]
        p += [f"permutation {fmt.p_value(one.p_permutation)}", *([one.test] if one.test else [])]
        lines.append(
            f"{one.task} {one.what}, leaderboard {one.leaderboard}: A less B {fmt.signed(one.difference)} ({', '.join(p)})"
        )
        lines.append(f"    A {_over(one.a)}, B {_over(one.b)}")
    for over in versus.over_tasks:
        interval = fmt.signed_between(over.low, over.high)
        lines.append(
            f"over {len(over.tasks)} tasks, leaderboard {over.leaderboard}: A less B {fmt.signed(over.difference)} {interval}, "
            f"p {fmt.p_value(over.p_value)}"
        )
    console.print(Text("\n".join((*lines, *versus.notes, f"{versus.measured()} n in brackets."))))
    console.print(Text(f"comparison: {visible(str(folder / 'compare.html'))}"), soft_wrap=True)


def _over(over: OverRuns) -> str:
    return " ".join(
        f"{fmt.signed(over.mean)} {fmt.over_between(over.interval, over.low, over.high)} ({over.n})".split()
    )


def head_lines(merged: MergedReport) -> list[str]:
    """Return the head of each experiment with whole chains, as `verify` computes it over all runs."""
    found: dict[Path, list[RunHead]] = {}
    for run, folder in zip(merged.runs, merged.run_folders, strict=True):
        if run.damage is None and run.imported is None and _in_utf8(folder):
            head = RunHead(run_id=Path(folder).name, entries=run.ledger_entries, head=run.ledger_head)
            found.setdefault(Path(folder).parent, []).append(head)
    names = {root: f"{name}/" for root, name in sites_of(experiment / "run" for experiment in found).items()}
    return [
        f"head of {names.get(path.parent, '')}{path.name}: {heads_of(ExperimentDir(path), heads).head} ({len(heads)} runs)"
        for path, heads in sorted(found.items())
    ]


def _in_utf8(path: str) -> bool:
    return os.fsencode(path).decode(errors="replace") == path


def _cell_lines(merged: MergedReport) -> list[str]:
    lines = [""]
    for number, board in enumerate(merged.boards, 1):
        which = f"conditions {number}, " if len(merged.boards) > 1 else ""
        for column in range(len(board.tasks)):
            for row in board.rows:
                cell = row.cells[column]
                if cell is None or cell.improvement.n < 2:
                    continue
                over, rank = cell.improvement, ""
                if cell.rank is not None:
                    rank = f", rank {cell.rank}" + (f" to {cell.last_rank}" if cell.last_rank != cell.rank else "")
                interval = f"{fmt.signed_between(over.low, over.high)} ({over.interval}), {over.n} runs"
                lost = f", {cell.lost} infrastructure" if cell.lost else ""
                lost += f", {cell.not_counted} not counted" if cell.not_counted else ""
                told = f"{fmt.signed(over.mean)} {interval}{rank}{lost}"
                lines.append(f"{which}{board.column(column)} {row.label}: {told}")
    return [*lines, ""] if len(lines) > 1 else lines


# --- `logs`: the log of a run's agent, gateway, supervisor or grader, without terminal escapes and secrets

LogOf = Literal["agent", "gateway", "supervisor", "grader"]
MAX_LINE_CHARS = 4000
CHUNK_BYTES = 1 << 20
PAUSE_S = 1.0


def logs_of(run: RunDir, of: LogOf) -> list[Path]:
    """Return the logs that exist. Supervisors and graders write to the logs of their jobs: the ledger and slurm.json name the jobs."""
    if of in ("agent", "gateway"):
        return [path for path in (run.agent_log if of == "agent" else run.gateway_log,) if path.is_file()]
    experiment, role = ExperimentDir(run.path.parent), "agents" if of == "supervisor" else "grader"
    ids: list[str | None] = []
    with suppress(AutorlError, OSError):
        ids += [one.entry.writer.job_id for one in Ledger(run).read() if one.entry.writer.role == of]
    with suppress(AutorlError, OSError):
        submitted = read_submitted(experiment)
        for job in submitted.submitted if submitted else ():
            if job.role.startswith(role):
                ids.append(f"{job.job_id}_{job.runs.index(run.run_id)}" if run.run_id in job.runs else job.job_id)
    ids += [str(job.pid) for job in jobs_of(experiment) if job.role.startswith(role)]
    paths = [experiment.jobs / f"{job_id}_0_log.out" for job_id in dict.fromkeys(ids) if job_id]
    return sorted((path for path in paths if path.is_file()), key=lambda path: path.stat().st_mtime)


def print_logs(run: RunDir, of: LogOf, follow: bool, say: Callable[[str], None]) -> None:
    """Print the logs of a run, one after the other; with `follow`, what is added until the run is over. Raises
    AutorlError: there is no such run, or no such log of it."""
    if not run.record.is_file():
        raise nothing_in(run.path)
    experiment = ExperimentDir(run.path.parent)
    others = [name for name in runs_of(experiment)[0] if name != run.run_id] if of in ("supervisor", "grader") else []
    at: dict[Path, int] = {}
    while True:
        over = run.run_id in reading.list_names(experiment.finished)
        paths = logs_of(run, of)
        for path in paths:
            if path not in at and len(paths) > 1:
                say(f"--- {path}")
            for line in _lines(path, at, last=over or not follow):
                if run.run_id in line or not any(name in line for name in others):
                    say(line)
        if not at and (over or not follow):
            where = run.logs if of in ("agent", "gateway") else experiment.jobs
            raise AutorlError(
                f"this run has no log of its {of}", where=where, next_step="see `autorl-hpc status` on it"
            )
        if over or not follow:
            return
        time.sleep(PAUSE_S)


def _lines(path: Path, at: dict[Path, int], last: bool) -> Iterator[str]:
    """Yield what was added to a log since the last call in whole lines, cleaned and masked; the unfinished line if `last`."""
    begin = at.setdefault(path, 0)
    descriptor = open_plain(path)
    if descriptor is None:
        return
    with os.fdopen(descriptor, "rb") as file:
        file.seek(begin)
        while data := file.read(CHUNK_BYTES):
            end = data.rfind(b"\n") + 1
            if not end and not last and len(data) < CHUNK_BYTES:
                return
            taken = data[: end or len(data)]
            at[path] += len(taken)
            file.seek(at[path])
            for line in masked(taken.decode("utf-8", "replace")).removesuffix("\n").split("\n"):
                yield clean_code(
                    line.rstrip("\r").rsplit("\r", 1)[-1], MAX_LINE_CHARS
                )  # of a progress bar the last state
