"""`launch` to the end, killed in the middle, launched again, cancelled, and on file systems that fail."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from helpers import PATIENCE_S, SUBMITS_ONE, VARIANTS, Cluster, wait_for

from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import alive_jobs, jobs_of
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.launch.local import processes

STEPS = (
    "#!/usr/bin/env bash\nset -e\ncd $WORKSPACE\n"
    + VARIANTS
    + """echo "start $AUTORL_ATTEMPT" >> code/journal
[ -e output/v0 ] || variants 0 1
[ -e code/first ] || { ./submit output/v0; touch code/first; }
while [ ! -e "$WORKSPACE/../../../go" ]; do sleep 0.1; done
variants $((1 + AUTORL_SEED)) 1
./submit output/v$((1 + AUTORL_SEED)) --wait
echo end >> code/journal
"""
)
"""Submits, waits for the file `go` in the root, submits another checkpoint and waits for its score."""

MINI: dict[str, Any] = {"task": "mini"}
GRADER: dict[str, Any] = {"stale_after_s": 3, "idle_exit_s": 600}
HOUR_S = 3600.0
CALM: dict[str, Any] = {"budget": {"wall_clock": HOUR_S}, "grader": GRADER}
"""What no busy machine uses up before a test is over."""


def launch(cluster: Cluster, *more: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """`autorl-hpc launch` of the experiment's file."""
    return cluster.run(
        "launch", str(cluster.root.path / "exp.yaml"), "--root", str(cluster.root.path), *more, check=check
    )


def wait_over(cluster: Cluster, run_ids: list[str]) -> None:
    """Waits until all runs are finished and no job is left."""

    def job_logs() -> str:
        return "\n".join(p.read_text(errors="replace")[-3000:] for p in cluster.experiment.jobs.glob("*.out"))

    try:
        wait_for(lambda: cluster.finished(run_ids) and not alive_jobs(cluster.experiment), "the end")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job_logs()}") from None


def run_ids_of(cluster: Cluster) -> list[str]:
    """The experiment's runs."""
    return list(json.loads(cluster.experiment.resolved.read_text())["runs"])


def ledger_bytes(cluster: Cluster, run_id: str) -> dict[str, bytes]:
    """Every file of a run's ledger. An unfinished one, of who is just writing, is none of it."""
    ledger = cluster.run_dir(run_id).ledger
    return {name: (ledger / name).read_bytes() for name in reading.list_names(ledger)}


def journal(cluster: Cluster, run_id: str) -> list[str]:
    """What the agent of STEPS wrote."""
    path = cluster.workspace(run_id) / "code" / "journal"
    return path.read_text().splitlines() if path.exists() else []


def kinds(cluster: Cluster, run_id: str) -> list[str]:
    """Kinds of a run's entries, in order, without those that come when they come or say how an attempt was confined."""
    found = [json.loads(data)["kind"] for _, data in sorted(ledger_bytes(cluster, run_id).items())]
    return [kind for kind in found if kind not in ("sandbox", "contamination", "fingerprint")]


def status(cluster: Cluster) -> dict[str, Any]:
    """`status --json` of the experiment."""
    (facts,) = json.loads(cluster.run("status", str(cluster.experiment.path), "--json").stdout)
    return dict(facts)


def test_launch_kill_everything_relaunch_report_verify(cluster: Cluster) -> None:  # noqa: PLR0915 - one long story
    cluster.mini_task()
    cluster.agent("steps", STEPS)
    cluster.agent("quick", SUBMITS_ONE)
    cluster.spec(["quick", "steps"], matrix={**MINI, "seed": [0, 1]}, parallel=4, **CALM)
    # Started beside a checkout whose package can't even be imported: jobs run the frozen code and nothing else.
    trap = cluster.root.path / "autorl_hpc"
    trap.mkdir()
    script = shutil.which("autorl-hpc", path=str(Path(sys.executable).parent))
    assert script, "the package's script is not installed beside this Python"
    (trap / "__init__.py").write_text("raise RuntimeError('not the frozen code')\n")
    job = [script, "launch", str(cluster.root.path / "exp.yaml"), "--root", str(cluster.root.path), "--json"]
    begun = time.monotonic()
    done = subprocess.run(job, env=cluster.env, cwd=cluster.root.path, capture_output=True, text=True, check=False)
    shutil.rmtree(trap)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["new"] == 4

    run_ids = run_ids_of(cluster)
    quick = [run_id for run_id in run_ids if "-quick-" in run_id]
    steps = [run_id for run_id in run_ids if "-steps-" in run_id]
    wait_for(lambda: cluster.finished(quick), what="the quick runs")
    wait_for(lambda: all(cluster.view(r).scores for r in steps), what="the first scores of the others")
    facts = status(cluster)
    assert {row["state"] for row in facts["runs"]} == {"finished", "running"}
    assert sorted(facts["jobs"]) == ["agents", "grader-0", "report"] and not facts["over"]
    row = next(row for row in facts["runs"] if row["run_id"] == steps[0])
    assert row["accepted"] == 1 and row["waiting"] == 0
    assert HOUR_S - (time.monotonic() - begun) - 1 <= row["left_s"] <= HOUR_S

    # Launch again while it runs: nothing starts twice.
    wait_for(
        lambda: not [words for words in processes(cluster.experiment).values() if words[-1] in quick], "their jobs"
    )
    before = jobs_of(cluster.experiment)
    here = lasting(cluster.experiment)
    launch(cluster)
    assert jobs_of(cluster.experiment) == before
    assert lasting(cluster.experiment) == here

    finished = {run_id: ledger_bytes(cluster, run_id) for run_id in quick}
    kill_everything(cluster)
    assert not alive_jobs(cluster.experiment)
    cluster.agent("quick", SUBMITS_ONE + "echo changed\n")
    done = launch(cluster, check=False)
    assert done.returncode == 2 and "--keep-frozen" in done.stderr and not processes(cluster.experiment)
    (cluster.root.path / "go").touch()
    done = launch(cluster, "--keep-frozen", "--json")
    assert json.loads(done.stdout)["finished"] == 2 and json.loads(done.stdout)["new"] == 0
    wait_over(cluster, run_ids)

    assert {run_id: ledger_bytes(cluster, run_id) for run_id in quick} == finished
    for run_id in steps:
        assert journal(cluster, run_id) == ["start 1", "start 2", "end"]
        assert kinds(cluster, run_id).count("submission") == 2
        assert kinds(cluster, run_id).count("score") == 2
        assert [kinds(cluster, run_id).count(k) for k in ("sealed", "closed")] == [1, 1]
    assert os.listdir(cluster.experiment.queue) == []
    assert os.listdir(cluster.experiment.claims) == []
    assert (cluster.experiment.report / "summary.json").exists()
    assert status(cluster)["over"]
    assert not processes(cluster.experiment)

    assert "4 runs, 0 damaged" in cluster.run("verify", str(cluster.experiment.path)).stdout
    run = cluster.run_dir(steps[0])
    (run.ledger / "000003.json").unlink()
    done = cluster.run("verify", str(run.path), "--json", check=False)
    (verdict,) = json.loads(done.stdout)
    assert done.returncode == 1 and not verdict["whole"]
    assert "000003.json is missing" in verdict["problems"][0]


def lasting(experiment: ExperimentDir) -> set[int]:
    """The processes of the jobs. One that is just starting another is shown twice, for a moment."""

    def twice() -> set[int]:
        first = set(processes(experiment))
        time.sleep(0.5)
        return first if set(processes(experiment)) == first else set()

    found: set[int] = wait_for(twice, "the jobs to stay as they are")
    return found


def kill_everything(cluster: Cluster) -> None:
    """kill -9 of controllers, array, chain, graders, supervisors, report; keepers then end the agents."""
    victims = [job.pid for job in alive_jobs(cluster.experiment)] + list(processes(cluster.experiment))
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not cluster.processes_here(), "the agents' end")


def test_launched_twice_at_once_then_one_cancelled_then_all(cluster: Cluster) -> None:
    cluster.mini_task()
    cluster.agent("steps", STEPS)
    cluster.spec(["steps"], matrix={**MINI, "seed": [0, 1, 2]}, parallel=2, **CALM)
    both = [threading.Thread(target=launch, args=(cluster,)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()

    def roles() -> list[str]:
        return sorted(words[0] for words in processes(cluster.experiment).values() if words[0] in ("array", "chain"))

    first, second, third = run_ids_of(cluster)
    wait_for(lambda: cluster.view(first).scores and cluster.view(second).scores, what="the first scores")
    # A second set would stay. A process that is just starting another is shown twice, for a moment.
    wait_for(lambda: roles() == ["array", "chain"], "one set of jobs", patience_s=60.0)
    # One that waits for a place is sealed at once, not when a place is free.
    done = cluster.run("cancel", str(cluster.experiment.path), third)
    assert "1 runs cancelled, 1 of them closed" in done.stdout, done.stdout
    assert kinds(cluster, third) == ["sealed", "closed"]
    done = cluster.run("cancel", str(cluster.experiment.path), first)
    assert "1 runs cancelled, 1 of them closed" in done.stdout, done.stdout
    assert kinds(cluster, first) == ["attempt_started", "submission", "score", "sealed", "closed"]
    assert cluster.view(second).sealed is None
    assert sorted(status(cluster)["jobs"]) == ["agents", "grader-0", "report"]

    # All but the supervisor killed, then cancelled: the next launch closes it.
    for pid, words in processes(cluster.experiment).items():
        if words[0] != "agent":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive_jobs(cluster.experiment), "the jobs' end")
    assert cluster.processes_here()
    done = cluster.run("cancel", str(cluster.experiment.path))
    assert "`autorl-hpc launch` again scores" in done.stdout
    assert not cluster.processes_here()
    sealed = cluster.view(second).sealed
    assert sealed is not None and sealed.ended_by == "cancelled"

    # Runs that are added later are not cancelled with those.
    cluster.spec(["steps"], matrix={**MINI, "seed": [0, 1, 2, 3]}, parallel=2, **CALM)
    launch(cluster)
    added = run_ids_of(cluster)[-1]
    wait_for(lambda: journal(cluster, added) and kinds(cluster, second)[-1] == "closed", what="the added run")
    done = cluster.run("cancel", str(cluster.experiment.path), "no-such-run", check=False)
    assert done.returncode == 2 and "no run no-such-run" in done.stderr
    done = cluster.run("cancel", str(cluster.experiment.path))
    assert "4 runs cancelled, 4 of them closed" in done.stdout, done.stdout
    assert not alive_jobs(cluster.experiment)
    assert not cluster.processes_here()
    assert os.listdir(cluster.experiment.claims) == []
    assert os.listdir(cluster.experiment.queue) == []
    assert (cluster.experiment.report / "summary.json").exists()


# ---------------------------------------------------------------- ctrl-C


def interrupt(cluster: Cluster, *arguments: str, when: Callable[[], Any], pause_s: float = 0.2) -> tuple[int, str, str]:
    """Runs a command in a process group of its own and interrupts the group, as a terminal does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "autorl_hpc", *arguments],
        env=cluster.env,
        cwd=cluster.root.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A test run in the background of a shell has SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  no threads here
    )
    cluster.processes.append(process)
    wait_for(lambda: when() or process.poll() is not None, what="the moment to interrupt")
    time.sleep(pause_s)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def assert_interrupted(result: tuple[int, str, str]) -> None:
    """Exit code 130 and one line that says so."""
    code, _, err = result
    assert code == 130, result
    assert "Traceback" not in err, err
    assert err.strip().splitlines()[-1].startswith("autorl-hpc: interrupted"), result


def test_ctrl_c_ends_the_watching_and_no_job(cluster: Cluster) -> None:
    cluster.mini_task()
    cluster.agent("steps", STEPS)
    cluster.spec(["steps"], matrix=MINI, **CALM)
    job = str(cluster.root.path / "exp.yaml")
    follow = ("launch", job, "--root", str(cluster.root.path), "--follow")
    assert_interrupted(interrupt(cluster, *follow, when=lambda: len(alive_jobs(cluster.experiment)) == 3))
    (run_id,) = run_ids_of(cluster)
    wait_for(lambda: journal(cluster, run_id), what="the agent")
    started = time.monotonic()

    def loaded() -> bool:  # before that Python itself may take the signal
        return "pydantic_core" in Path(f"/proc/{cluster.processes[-1].pid}/maps").read_text()

    watch = ("status", str(cluster.experiment.path), "--watch")
    assert_interrupted(interrupt(cluster, *watch, when=lambda: time.monotonic() - started > 5 and loaded()))
    assert sorted(job.role for job in alive_jobs(cluster.experiment)) == ["agents", "grader-0", "report"]


def test_ctrl_c_in_stage_leaves_nothing_half(cluster: Cluster) -> None:
    cluster.mini_task()
    prepare = cluster.share / "tasks" / "mini" / "prepare.py"
    text = prepare.read_text()
    prepare.write_text(
        "import time\n"
        + text.replace(
            "def prepare(source, out):\n",
            "def prepare(source, out):\n    (out / 'half').touch()\n    time.sleep(600)\n",
        )
    )
    places = (cluster.root.store / "tasks", cluster.root.vault)
    stage = ("stage", "mini", "--again", "--root", str(cluster.root.path))
    assert_interrupted(
        interrupt(cluster, *stage, when=lambda: [p for place in places for p in place.glob(".tmp-*/half")])
    )
    assert not [path for place in places for path in place.glob(".tmp-*")]
    prepare.write_text(text)
    cluster.run("stage", "mini", "--root", str(cluster.root.path))


# ---------------------------------------------------------------- file systems that fail


@pytest.fixture
def small_disk(cluster: Cluster) -> Iterator[Path]:
    """A tmpfs of 24 MiB as runs/ of the cluster; the test skips where mounting is forbidden."""
    runs = cluster.root.runs
    runs.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "autorl-test", str(runs)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        needs.skip("mount", "mounting a tmpfs is not permitted here")
    yield runs
    cluster.end()
    subprocess.run(["umount", "-l", str(runs)], check=True)


def fill(folder: Path) -> Path:
    """Fills a file system to the last block; again what became free since."""
    path = folder / "filler"
    with open(path, "ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return path


def test_a_disk_that_is_full_at_launch_and_in_the_middle_loses_nothing(cluster: Cluster, small_disk: Path) -> None:
    cluster.mini_task()
    cluster.agent("steps", STEPS)
    cluster.spec(["steps"], matrix=MINI, **CALM)
    filler = fill(small_disk)
    done = launch(cluster, check=False)
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
    assert "No space left on device" in done.stderr and "free some space" in done.stderr
    filler.unlink()
    launch(cluster)
    (run_id,) = run_ids_of(cluster)
    wait_for(lambda: cluster.view(run_id).scores, what="the first score")
    before = ledger_bytes(cluster, run_id)
    filler = fill(small_disk)
    (cluster.root.path / "go").touch()
    wait_for((cluster.workspace(run_id) / "output" / "v1").exists, what="the second checkpoint")
    time.sleep(4)
    after = ledger_bytes(cluster, run_id)
    assert before.items() <= after.items() and all(
        json.loads(entry) for entry in after.values()
    )  # none lost, none half
    assert len(cluster.view(run_id).submissions) == 1, "the second checkpoint was taken in on a full disk"
    fill(small_disk)  # whoever was writing when the disk was full has removed what it could not finish
    done = launch(cluster, check=False)
    assert done.returncode == 3 and "No space left on device" in done.stderr, done.stderr
    filler.unlink()
    launch(cluster)
    wait_over(cluster, [run_id])
    view = cluster.view(run_id)
    assert [s.status for s in view.submissions.values()] == ["accepted", "accepted"]
    assert all(score.evaluation.score is not None for score in view.scores.values()) and len(view.scores) == 2
    assert journal(cluster, run_id)[-1] == "end"
    assert "0 damaged" in cluster.run("verify", str(cluster.experiment.path)).stdout
