"""Held-out items in a workspace, found by the real supervisor's scanner while a real agent works."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from helpers import PATIENCE_S, VARIANTS, Cluster, wait_for

from autorl_hpc.files.ledger import Ledger
from autorl_hpc.records.entries import Contamination
from autorl_hpc.states import EntryKind, Split
from autorl_hpc.supervise.scanner import NICE

BASH = '#!/usr/bin/env bash\nset -e\ncd "$WORKSPACE"\n' + VARIANTS
HONEST = BASH + "cp data/train.jsonl code/mine.jsonl\nvariants 0 1\n./submit output/v0\n"


LARGE = "yes 'many words of no interest to anybody at all' | head -c 150000000 > output/large.txt || true\n"
"""Text that takes a scanner many seconds."""

UNTIL_OVER = "until [ -e code/over ]; do sleep 0.1; done\n"
"""The end of an agent that lives until the test lets it go."""


def looks(cluster: Cluster, run_id: str) -> list[Contamination]:
    """The looks of a run, in order."""
    return cluster.view(run_id).contaminations


def items(cluster: Cluster, split: str) -> list[dict[str, str]]:
    """The held-out items of the task."""
    lines = (cluster.root.task_vault("arithmetic") / split / "items.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def looked_at(cluster: Cluster, script: str) -> str:
    """A run whose agent does this and ends once its workspace was looked at; the run id."""
    cluster.agent("one", script + UNTIL_OVER)
    (run_id,) = cluster.prepare(["one"])
    supervisor = cluster.supervisor(run_id)
    wait_for(lambda: looks(cluster, run_id), "the look after the submission")
    (cluster.workspace(run_id) / "code" / "over").touch()
    assert supervisor.wait(PATIENCE_S) == 0, cluster.logs()
    return run_id


def agent_that_holds(folder: Path, cluster: Cluster, count: int = 3) -> str:
    """An agent that copies leaked questions out of a file of the test's into its workspace, then submits."""
    (folder / "leak.txt").write_text("\n".join(item["question"] for item in items(cluster, "report")[:count]))
    return BASH + f"tr a-z A-Z < {folder}/leak.txt | fold -s -w 30 > code/notes.txt\nvariants 0 1\n./submit output/v0\n"


def test_a_leak_is_found_after_the_submission_and_at_the_end(cluster: Cluster, tmp_path: Path) -> None:
    run_id = looked_at(cluster, agent_that_holds(tmp_path, cluster))
    first, last = looks(cluster, run_id)
    for look in (first, last):
        assert look.items[Split.REPORT] == look.whole[Split.REPORT] == 3
        assert look.items[Split.FEEDBACK] == 0
        assert look.of == {Split.FEEDBACK: 300, Split.REPORT: 500} and look.given == 0
        (found,) = look.found
        assert (found.file, found.how, found.items) == ("code/notes.txt", "exact", 3)
        assert found.first_items == tuple(item["id"] for item in items(cluster, "report")[:3])
        assert look.complete and look.reason is None
    assert (first.submission_id, last.submission_id) == (1, None)
    assert last.bytes_unchanged > 0 and last.bytes_scanned < first.bytes_scanned
    kinds = [str(linked.kind) for linked in Ledger(cluster.run_dir(run_id)).read()]
    assert kinds[-2:] == [str(EntryKind.CONTAMINATION), str(EntryKind.SEALED)]
    # Nobody tells the agent.
    for path in cluster.workspace(run_id).rglob("*"):
        if path.is_file() and "models" not in path.parts:
            assert b"contaminat" not in path.read_bytes().lower(), path


def test_a_scanner_that_is_killed_costs_a_look_and_not_the_run(cluster: Cluster, tmp_path: Path) -> None:
    # A look that takes longer than it takes to kill its scanner, for as long as the agent works.
    script = agent_that_holds(tmp_path, cluster).replace("variants 0 1\n", LARGE + "variants 0 1\n")
    cluster.agent("one", script + UNTIL_OVER + "rm output/large.txt\n")
    (run_id,) = cluster.prepare(["one"])
    supervisor = cluster.supervisor(run_id)
    killed: set[int] = set()

    def kills() -> bool:
        for pid in _scanners(supervisor.pid) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        return bool(looks(cluster, run_id))

    wait_for(kills, "the look to be given up")
    (cluster.workspace(run_id) / "code" / "over").touch()
    assert supervisor.wait(PATIENCE_S) == 0, cluster.logs()
    first, last = looks(cluster, run_id)[0], looks(cluster, run_id)[-1]
    assert killed
    assert not first.complete and first.reason is not None and "ended from outside" in first.reason
    assert last.submission_id is None and last.items[Split.REPORT] == 3


def test_a_stopped_scanner_delays_the_seal_by_a_bounded_time(cluster: Cluster, tmp_path: Path) -> None:
    cluster.agent(
        "one", agent_that_holds(tmp_path, cluster).replace("variants 0 1\n", LARGE + "variants 0 1\n") + UNTIL_OVER
    )
    (run_id,) = cluster.prepare(["one"])
    supervisor = cluster.supervisor(run_id)
    (scanner,) = wait_for(lambda: _scanners(supervisor.pid), "the scanner")
    os.kill(scanner, signal.SIGSTOP)
    (cluster.workspace(run_id) / "code" / "over").touch()
    assert supervisor.wait(PATIENCE_S) == 0, cluster.logs()
    assert cluster.view(run_id).sealed is not None
    assert looks(cluster, run_id)[-1].submission_id is None


def test_the_scanner_ends_with_a_killed_supervisor(cluster: Cluster) -> None:
    cluster.agent("one", HONEST.replace("variants 0 1\n", LARGE + "variants 0 1\n") + "sleep 600\n")
    (run_id,) = cluster.prepare(["one"])
    supervisor = cluster.supervisor(run_id)
    (pid,) = wait_for(lambda: _scanners(supervisor.pid), what="the scanner")
    wait_for(lambda: os.getpriority(os.PRIO_PROCESS, pid) == NICE, "it to make way for the agent")
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: not _lives(pid), "the scanner's end")


def _lives(pid: int) -> bool:
    """Whether it runs: one that ended stays in /proc until whoever adopted it asks for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _scanners(supervisor: int) -> set[int]:
    found: set[int] = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                inside = b"supervise.scanner" in (path / "cmdline").read_bytes()
                parent = int((path / "stat").read_bytes().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            if inside and parent == supervisor:
                found.add(int(path.name))
    return found
