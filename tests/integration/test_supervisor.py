"""The supervisor: deaths, signals, the budget, and agents that try to outlive it. Real processes throughout."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import needs
import pytest
from helpers import PATIENCE_S, VARIANTS, Cluster, alive, wait_for

from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.processes import ALLOWED
from autorl_hpc.states import EndedBy, EntryKind, Fault
from autorl_hpc.supervise import budget as budgets
from autorl_hpc.supervise.supervisor import LOOK_S

BASH = "#!/usr/bin/env bash\ncd $WORKSPACE\n"

TICKS = BASH + "while true; do date +%s.%N >> code/ticks-$AUTORL_ATTEMPT; sleep 0.05; done\n"
"""An agent that writes the time twenty times a second for as long as it lives."""

HASTENED = """
import functools, sys
from pathlib import Path
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.supervise import attempt_ledger, budget, supervisor
experiment, run_id, over, suspension_s, look_s, lag_s = sys.argv[1:]
real = budget.BudgetClock.limit_s.fget
budget.BudgetClock.limit_s = property(lambda self: min(1.0, real(self)) if Path(over).exists() else real(self))
supervisor.BudgetClock = functools.partial(budget.BudgetClock, suspension_s=float(suspension_s))
supervisor.AgentRun = functools.partial(supervisor.AgentRun, look_s=float(look_s))
attempt_ledger.SIGNAL_LAG_S = float(lag_s)
sys.exit(supervisor.run_agent_job(ExperimentDir(Path(experiment)), run_id))
"""
"""A supervisor whose budget is a second from the moment that a file is there. Its clock goes as ever. It waits for its own signal
for as long as a busy machine may take to send it."""

NOT_SEEN_S = 0.5
"""Of an agent's life after its keeper's last look. Else its clock has counted all of it."""

HOUR = {"wall_clock": "1h", "grace": "0s"}
"""A budget that no busy machine uses up before the test says so."""

LEAVES_PROCESSES = (
    BASH
    + r"""
tag=$1
cat > code/linger.py <<'END'
import os, signal, sys, time
kind = sys.argv[1]
def note():
    with open(f"code/pids-{kind}", "a") as file:
        file.write(f"{os.getpid()}\n")
if kind == "setsid":
    os.setsid()
elif kind == "double":
    if os.fork(): os._exit(0)
    os.setsid()
    if os.fork(): os._exit(0)
elif kind == "deaf":
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
elif kind == "closed":
    note()
    os.closerange(0, 256)
elif kind == "bomb":
    for _ in range(200):
        if os.fork() == 0: break
elif kind == "headless":  # the first thread ends, another goes on: /proc shows a zombie
    import ctypes, platform, threading
    threading.Thread(target=time.sleep, args=(600,)).start()
    note()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
if kind not in ("closed", "headless"): note()
while True: time.sleep(600)
END
export PYTHONDONTWRITEBYTECODE=1
for kind in setsid double deaf closed bomb headless; do python3 code/linger.py $kind > /dev/null 2>&1 & done
nohup python3 code/linger.py nohup > /dev/null 2>&1 &
env -i "$(command -v python3)" code/linger.py bare > /dev/null 2>&1 &
(env -i setsid "$(command -v python3)" code/linger.py double-bare > /dev/null 2>&1 &)
while [ "$(cat code/pids-bomb 2>/dev/null | wc -l)" -lt 201 ] || [ "$(ls code/pids-* | wc -l)" -lt 9 ]; do sleep 0.1; done
touch code/all
"""
)


def one(cluster: Cluster, script: str, **changes: Any) -> str:
    """An experiment of one run with an agent of the test's own."""
    cluster.agent("one", script)
    (run_id,) = cluster.prepare(["one"], **changes)
    return run_id


class Hastened:
    """A run's supervisor, and the end of its budget when the test says so."""

    def __init__(
        self,
        cluster: Cluster,
        run_id: str,
        suspension_s: float = budgets.SUSPENSION_S,
        look_s: float = LOOK_S,
        lag_s: float = 600.0,
    ) -> None:
        self._over = cluster.root.path / "over"
        told = (self._over, suspension_s, look_s, lag_s)
        given = (str(cluster.experiment.path), run_id, *map(str, told))
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", HASTENED, *given], env=cluster.env, cwd=cluster.root.path, start_new_session=True
        )
        cluster.processes.append(self.process)

    def end_budget(self) -> None:
        """From now on the budget is used up."""
        self._over.touch()

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(PATIENCE_S)

    @property
    def age_s(self) -> float:
        """Since it was started: no clock of it can have counted more."""
        return time.monotonic() - self.begun


def kinds(cluster: Cluster, run_id: str) -> list[str]:
    """The kinds of the run's ledger entries, without those that come when they come or say how an attempt was confined."""
    apart = (EntryKind.SANDBOX, EntryKind.CONTAMINATION)
    return [str(linked.kind) for linked in Ledger(cluster.run_dir(run_id)).read() if linked.kind not in apart]


def ticks(cluster: Cluster, run_id: str) -> list[float]:
    """When the agent was seen alive, by its own clock."""
    return [moment for attempt in ticks_of_attempts(cluster, run_id) for moment in attempt]


def ticks_of_attempts(cluster: Cluster, run_id: str) -> list[list[float]]:
    """The same, by attempt. The last line may be half written."""
    paths = sorted((cluster.workspace(run_id) / "code").glob("ticks-*"))
    return [[float(line) for line in path.read_text().splitlines() if len(line) > 12] for path in paths]


def wait_for_ticks(cluster: Cluster, run_id: str, count: int) -> None:
    """Waits for so many more signs of the agent's life."""
    seen = len(ticks(cluster, run_id))
    wait_for(lambda: len(ticks(cluster, run_id)) >= seen + count, what="the agent")


def active_s(cluster: Cluster, run_id: str, stopped_s: float = 1e9) -> float:
    """Seconds in which the agent was alive, over all attempts; pauses as long as `stopped_s` left out."""
    pairs = [pair for attempt in ticks_of_attempts(cluster, run_id) for pair in itertools.pairwise(attempt)]
    return sum(after - before for before, after in pairs if after - before < stopped_s)


def agent_pids(cluster: Cluster, run_id: str) -> set[int]:
    """Living processes with the run's workspace in their environment, or working in it."""
    mark = str(cluster.workspace(run_id)).encode()
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            inside = os.readlink(f"/proc/{name}/cwd").encode().startswith(mark)
            if inside or mark in Path(f"/proc/{name}/environ").read_bytes():
                found.add(int(name))
        except OSError:
            continue
    return found


# ---------------------------------------------------------------- deaths and signals


def test_killed_supervisors_take_their_agents_along_until_the_attempts_are_used_up(cluster: Cluster) -> None:
    run_id = one(cluster, TICKS, budget=HOUR, attempts=2)
    run, workspace, lived_s = cluster.run_dir(run_id), cluster.workspace(run_id), 0.0
    for attempt_number in (1, 2):
        begun, supervisor = time.monotonic(), cluster.supervisor(run_id)
        before_s = active_s(cluster, run_id)
        wait_for(lambda before_s=before_s: active_s(cluster, run_id) > before_s + 3, what="three seconds of the agent")
        (workspace / "code" / f"mine-{attempt_number}").write_text("kept")
        assert agent_pids(cluster, run_id)
        keepers = children(supervisor.pid)
        supervisor.kill()
        supervisor.wait()
        wait_for(lambda: not agent_pids(cluster, run_id), "the keeper to end the agent")
        wait_for(lambda keepers=keepers: not any(map(alive, keepers)), "the keeper to note the time and end")
        lived_s += time.monotonic() - begun
        elapsed = json.loads((run.path / f"elapsed-{attempt_number}.json").read_text())["elapsed_s"]
        assert active_s(cluster, run_id) - NOT_SEEN_S <= elapsed <= lived_s
    view = cluster.view(run_id)
    first = json.loads((run.path / "elapsed-1.json").read_text())["elapsed_s"]
    assert view.attempts[1].elapsed_s == pytest.approx(first, abs=0.01), "what the first used is charged, once"
    assert 'attempt": 2' in (workspace / "run_meta.json").read_text()
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0
    assert not agent_pids(cluster, run_id) and (workspace / "code" / "mine-1").read_text() == "kept"
    assert kinds(cluster, run_id) == ["attempt_started", "attempt_started", "sealed"]
    sealed = cluster.view(run_id).sealed
    assert sealed is not None and sealed.elapsed_s == pytest.approx(elapsed, abs=0.01)
    assert (sealed.ended_by, sealed.fault) == (EndedBy.CRASHED, Fault.CLUSTER)
    assert "killed without a word" in str(sealed.reason)


def test_a_deleted_workspace_is_told_and_not_tried_again(cluster: Cluster) -> None:
    """Catches a purge of scratch that three attempts meet, of which the last two begin with an empty workspace and no word."""
    cluster.agent("sleeper", "sleep 600")
    (run_id,) = cluster.prepare(["sleeper"])
    first = cluster.supervisor(run_id)
    events = cluster.run_dir(run_id).events
    wait_for(lambda: events.exists() and "agent_started" in events.read_text(), "the agent's start")
    while cluster.workspace(run_id).exists():  # the supervisor still writes into it
        shutil.rmtree(cluster.workspace(run_id), ignore_errors=True)
    assert first.wait(PATIENCE_S) == 0, "no other attempt is to follow"
    sealed = cluster.view(run_id).sealed
    assert sealed is not None and (sealed.ended_by, sealed.fault) == (EndedBy.CRASHED, Fault.CLUSTER)
    assert "workspace was deleted" in (sealed.reason or "") and "purge" in (sealed.reason or "")


FULL = {
    "read-only": ("mount -o remount,ro $SCRATCH", "Read-only file system; file system {}: "),
    "no space": ("cat /dev/zero > code/zeros", "No space left on device; file system {}: 0.0 of 0.0 GiB free"),
}
IMPATIENT = """
import sys
from pathlib import Path
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.supervise import attempt_ledger, supervisor
attempt_ledger.END_PATIENCE_S = 1.0
sys.exit(supervisor.run_agent_job(ExperimentDir(Path(sys.argv[1])), sys.argv[2]))
"""
"""A supervisor that waits a second for a file system that fails."""


@pytest.mark.parametrize("how", FULL)
def test_a_workspace_that_takes_no_file_is_the_clusters_fault_and_no_agent_is_started_in_it(
    cluster: Cluster, how: str
) -> None:
    """Catches a file system that is full, has no inodes left or turned read-only: agents failed in it by their own fault."""
    (fills, words), scratch = FULL[how], cluster.root.path / "scratch"
    run_id = one(cluster, BASH + f"SCRATCH={scratch}\n{fills} 2> /dev/null\nexit 1\n", budget=HOUR)
    scratch.mkdir()
    twice = f'mount -t tmpfs -o size=40m,nr_inodes=4000 none {scratch} || exit 9; "$@"; echo $?; "$@"; exit $?'
    given = [sys.executable, "-c", IMPATIENT, str(cluster.experiment.path), run_id]
    command = [*namespace("--user", "--map-root-user", "--mount"), "bash", "-c", twice, "twice", *given]
    done = subprocess.run(command, env=cluster.env, cwd=cluster.root.path, capture_output=True, text=True, check=False)
    assert (done.stdout.split()[0], done.returncode) == ("75", 0), done.stderr
    view = cluster.view(run_id)
    assert f"writing into the workspace failed: {words.format(scratch)}" in view.ended[0].reason
    assert view.sealed is not None and (view.sealed.ended_by, view.sealed.fault) == (EndedBy.CRASHED, Fault.CLUSTER)
    assert words.format(scratch) in str(view.sealed.reason), "told at once, and not tried a third time"
    assert (view.attempt, view.sealed.starts) == (2, 1)


def test_a_preemption_ends_the_attempt_and_not_the_run(cluster: Cluster) -> None:
    """More often than `attempts`: it is no crash. The second one comes as from a scheduler, to supervisor, keeper and agent at
    once: the agent's death is not its end of work. The agent goes on by its own script."""
    program = ["bash", "-c", "echo keeps 1.2.3; pwd"]
    cluster.agent("keeps", TICKS.replace("while", "echo first >> code/said\nwhile"), resume="again.sh", program=program)
    again = TICKS.replace("while", 'echo "again $AUTORL_ATTEMPT" >> code/said\nwhile')
    (cluster._frozen() / "templates" / "agents" / "keeps" / "again.sh").write_text(again)
    (run_id,) = cluster.prepare(["keeps"], budget=HOUR, attempts=1)
    lived_s = 0.0
    for number in range(2):
        supervisor = Hastened(cluster, run_id)
        before_s = active_s(cluster, run_id)
        wait_for(lambda before_s=before_s: active_s(cluster, run_id) > before_s + 2.5, "the agent")
        if number:
            for pid in [*agent_pids(cluster, run_id), *children(supervisor.process.pid)]:
                with contextlib.suppress(ProcessLookupError):  # a short one of the agent's may be at its end
                    os.kill(pid, signal.SIGTERM)
            time.sleep(0.5)
        supervisor.process.send_signal((signal.SIGUSR2, signal.SIGTERM)[number])
        assert supervisor.wait() == 75, cluster.logs()
        lived_s += supervisor.age_s
        assert not agent_pids(cluster, run_id)
        ended = cluster.view(run_id).ended[number]
        assert active_s(cluster, run_id) - NOT_SEEN_S <= ended.elapsed_s <= lived_s
    last = Hastened(cluster, run_id)
    wait_for_ticks(cluster, run_id, 20)
    last.end_budget()
    assert last.wait() == 0
    view = cluster.view(run_id)
    assert view.sealed is not None and view.sealed.ended_by is EndedBy.BUDGET
    assert [e.reason for e in view.ended] == [f"signal {signal.SIGUSR2:d}", "signal 15"]
    assert kinds(cluster, run_id) == ["attempt_started", "attempt_ended"] * 2 + ["attempt_started", "sealed"]
    assert [a.elapsed_s for a in view.attempts] == pytest.approx([0.0, *(e.elapsed_s for e in view.ended)], abs=0.01)
    assert active_s(cluster, run_id) - NOT_SEEN_S <= view.sealed.elapsed_s <= view.ended[1].elapsed_s + last.age_s
    assert (cluster.workspace(run_id) / "code" / "said").read_text() == "first\nagain 2\nagain 3\n"
    lines = map(json.loads, cluster.run_dir(run_id).events.read_text().splitlines())
    told = [(line["attempt"], line["version"]) for line in lines if line["event"] == "agent_version"]
    assert told == [(number, "1.2.3") for number in (1, 2, 3)], "each attempt asks the agent's program, in its sandbox"


# ---------------------------------------------------------------- the budget


STOPPED_S, SUSPENSION_S = 16.0, 9.0


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    return [int(part) for part in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_budget_end_seals_in_time_and_only_what_was_dropped_before_counts(cluster: Cluster) -> None:
    cluster.mini_task()
    script = (
        BASH
        + VARIANTS
        + """variants 0 2
trap '' TERM
echo '{"schema_version": 1, "model_path": "output/v0"}' > submissions/.tmp-last && mv submissions/.tmp-last submissions/last.json
touch code/dropped
sleep 600
"""
    )
    run_id = one(cluster, script, budget=HOUR, matrix={"task": "mini"})
    supervisor = Hastened(cluster, run_id)
    wait_for((cluster.workspace(run_id) / "code" / "dropped").exists, what="the agent")
    over = time.monotonic()
    supervisor.end_budget()
    wait_for(lambda: cluster.view(run_id).sealed, "the seal")
    sealed = cluster.view(run_id).sealed
    assert sealed is not None and sealed.ended_by is EndedBy.BUDGET
    # Deaf to TERM: it was killed at the end of the grace of 5 s.
    assert 5.0 <= sealed.elapsed_s <= supervisor.age_s and 5.0 <= time.monotonic() - over <= 5.0 + 120.0
    assert supervisor.wait() == 0
    late = cluster.workspace(run_id) / "submissions" / "late.json"
    late.write_text('{"schema_version": 1, "model_path": "output/v1"}')
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0  # a sealed run takes nothing in
    assert late.exists()
    assert cluster.grader().wait(PATIENCE_S) == 0, cluster.logs()
    view = cluster.view(run_id)
    assert [s.manifest_id for s in view.accepted()] == ["last"]
    assert set(view.scores) == {1} and view.scores[1].evaluation.score is not None
    assert kinds(cluster, run_id).count("sealed") == 1


# ---------------------------------------------------------------- agents that leave things behind


def test_nothing_of_the_agent_is_left(cluster: Cluster) -> None:
    run_id = one(cluster, LEAVES_PROCESSES + "exit 0\n", budget=HOUR)
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    sealed = cluster.view(run_id).sealed
    assert sealed is not None and sealed.ended_by is EndedBy.AGENT_EXIT
    started = {
        path.name.removeprefix("pids-"): [int(pid) for pid in path.read_text().split()]
        for path in (cluster.workspace(run_id) / "code").glob("pids-*")
    }
    assert set(started) == {*("setsid", "double", "deaf", "closed", "bomb", "headless", "nohup", "bare", "double-bare")}
    assert len(started["bomb"]) == 201
    left = {kind: [pid for pid in pids if alive(pid) or alive_headless(pid)] for kind, pids in started.items()}
    assert not any(left.values()), left
    assert not agent_pids(cluster, run_id)


def alive_headless(pid: int) -> bool:
    """Whether a process goes on without its first thread."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def test_agent_that_kills_its_keeper_is_ended(cluster: Cluster) -> None:
    run_id = one(
        cluster,
        BASH
        + "env -i setsid sleep 601 &\necho $! > code/child\nkill -9 $PPID\nsleep 0.3; touch code/survived; sleep 600\n",
    )
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    sealed = cluster.view(run_id).sealed
    assert sealed is not None
    assert (sealed.ended_by, sealed.exit_code, sealed.fault) == (EndedBy.AGENT_EXIT, None, Fault.AGENT)
    assert "keeper was killed" in str(sealed.reason)
    assert not agent_pids(cluster, run_id)
    assert not alive(int((cluster.workspace(run_id) / "code" / "child").read_text()))


# ---------------------------------------------------------------- the environment

DOCUMENTED = {
    *("TASK", "BASE_MODEL", "WORKSPACE", "MODEL_PATH", "DATA_PATH", "OUTPUT_DIR", "GRADING_SERVER_URL"),
    *("AUTORL_SEED", "AUTORL_MODE", "AUTORL_ATTEMPT", "AUTORL_START", "AUTORL_RUN_MARK", "HOME", "TMPDIR"),
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HOME", "TOKENIZERS_PARALLELISM", "PYTHONUNBUFFERED"),
    *("PATH", "LANG", "OMP_NUM_THREADS", "PYTHONPATH", "AUTORL_OBSERVED"),
}


def test_agents_environment_is_the_documented_one_and_its_exit_code_is_its_fault(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {
        "SECRET_TOKEN": "s3cret-a",
        "HF_TOKEN": "s3cret-b",
        "SLURM_JOB_ID": "s3cret-c",
        "SLURM_CPU_BIND": "s3cret-d",
        "PYTHONPATH": "s3cret-e",
        "AWS_SECRET_ACCESS_KEY": "s3cret-f",
        "LD_PRELOAD_X": "s3cret-g",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5e1,MIG-7")
    monkeypatch.setenv("TZ", "UTC")
    script = "env -0 > $WORKSPACE/code/env; tr -d '\\n' < /proc/$PPID/environ > $WORKSPACE/code/keeper; exit 7\n"
    run_id = one(cluster, "#!/usr/bin/env bash\n" + script)
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    profile = {"name": "site", "scheduler": "local", "agent_variables": ["NCCL_*", "SECRET_TOKEN", "GLOO_*"]}
    resolved = cluster.experiment.resolved
    resolved.write_text(json.dumps({**json.loads(resolved.read_text()), "cluster": profile}))
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    sealed = cluster.view(run_id).sealed
    assert sealed is not None
    assert (sealed.exit_code, sealed.ended_by, sealed.fault) == (7, EndedBy.AGENT_EXIT, Fault.AGENT)
    code = cluster.workspace(run_id) / "code"
    env = dict(part.split("=", 1) for part in (code / "env").read_text().split("\0") if part)
    by_bash = {"_", "PWD", "OLDPWD", "SHLVL"}
    outer = {name for name in ALLOWED if name in os.environ}
    assert set(env) - by_bash == DOCUMENTED | outer | {"NCCL_IB_HCA"}
    for text in ((code / "env").read_text(), (code / "keeper").read_text()):
        assert not re.search("s3cret", text)
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-5e1,MIG-7"
    assert env["WORKSPACE"] == str(cluster.workspace(run_id))


def test_a_signal_in_the_last_intake_loses_no_submission(cluster: Cluster) -> None:
    """What was dropped before the agent's end is taken in by the next attempt, which doesn't start the agent again."""
    script = (
        BASH
        + "echo start >> code/starts; cp -r $MODEL_PATH output/v1; mkdir drop\n"
        + 'for i in $(seq 120); do echo \'{"model_path": "output/v1"}\' > drop/m$i.json; done\n'
        + "mv drop/*.json submissions/\n"
    )
    run_id = one(cluster, script)
    supervisor = cluster.supervisor(run_id)
    ledger = cluster.run_dir(run_id).ledger
    wait_for(lambda: len(os.listdir(ledger)) > 5, what="the intake")
    supervisor.terminate()
    code = supervisor.wait(PATIENCE_S)
    assert code in (0, 75), cluster.logs()  # 0: this machine had taken all of them in by then
    if code == 75:
        assert os.listdir(cluster.workspace(run_id) / "submissions") and cluster.view(run_id).sealed is None
        assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    view = cluster.view(run_id)
    assert view.sealed is not None and view.sealed.ended_by is EndedBy.AGENT_EXIT and view.sealed.exit_code == 0
    assert len(view.accepted()) == 120
    assert (cluster.workspace(run_id) / "code" / "starts").read_text() == "start\n"


def test_two_supervisors_at_once_make_one_run(cluster: Cluster) -> None:
    """The newer one ends the older one's agent, which is no early end after which that one would start it again."""
    run_id = one(
        cluster, TICKS.replace("while", "echo $AUTORL_ATTEMPT >> code/starts\nwhile"), budget=HOUR, reprompts=1
    )
    older = Hastened(cluster, run_id, look_s=600.0, lag_s=0.0)  # it has not looked at the ledger for long
    wait_for(lambda: len(ticks(cluster, run_id)) > 10, what="the agent")
    newer = Hastened(cluster, run_id)
    assert older.wait() == 0, cluster.logs()
    wait_for_ticks(cluster, run_id, 20)
    newer.end_budget()
    assert newer.wait() == 0, cluster.logs()
    assert kinds(cluster, run_id) == ["attempt_started", "attempt_started", "sealed"]
    sealed = cluster.view(run_id).sealed
    assert sealed is not None and (sealed.ended_by, sealed.reprompts) == (EndedBy.BUDGET, 0)
    moments = ticks(cluster, run_id)
    assert moments == sorted(moments), "two agents were alive at once"
    assert (cluster.workspace(run_id) / "code" / "starts").read_text() == "1\n2\n"
    assert not agent_pids(cluster, run_id)


def test_stopped_supervisor_is_not_charged(cluster: Cluster) -> None:
    """As a suspended job: supervisor, keeper and agent are stopped. The limit of 30 s is made less for the test, but no less
    than what a busy machine may do to a process by itself."""
    run_id = one(cluster, TICKS, budget=HOUR)
    supervisor = Hastened(cluster, run_id, SUSPENSION_S)
    wait_for(lambda: active_s(cluster, run_id) > 2, what="two seconds of the agent")
    everyone = [supervisor.process.pid, *children(supervisor.process.pid), *agent_pids(cluster, run_id)]
    for pid in everyone:
        with contextlib.suppress(ProcessLookupError):  # one of the agent's short ones
            os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    for pid in everyone:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    wait_for_ticks(cluster, run_id, 20)
    supervisor.end_budget()
    assert supervisor.wait() == 0
    lived_s = supervisor.age_s - STOPPED_S
    sealed = cluster.view(run_id).sealed
    assert sealed is not None and sealed.ended_by is EndedBy.BUDGET
    active = active_s(cluster, run_id, STOPPED_S - 2.0)
    assert active > 2
    assert active - NOT_SEEN_S <= sealed.elapsed_s <= lived_s
    keeper_says = json.loads((cluster.run_dir(run_id).path / "elapsed-1.json").read_text())["elapsed_s"]
    assert active - NOT_SEEN_S <= keeper_says <= lived_s
    clock = budgets.read_clock(cluster.run_dir(run_id).clock)
    assert clock is not None and STOPPED_S <= clock.suspended_s <= supervisor.age_s - active + NOT_SEEN_S


def namespace(*more: str) -> list[str]:
    """The command that runs another in process and mount namespaces of its own; the test skips where that is forbidden."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *more]
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        needs.skip("namespaces", "unshare --pid is not permitted here")
    return [*command, "bash", "-c", '"$@"; exit $?', "init"]  # the first process of a namespace can't be killed in it


def test_an_older_supervisor_that_still_prepares_starts_no_agent(cluster: Cluster) -> None:
    hold = cluster.root.path / "hold"
    program = ["bash", "-c", f"[ ! -e {hold} ] || {{ rm {hold}; sleep 600; }}; echo slow 1.0"]
    cluster.agent("slow", BASH + "echo $AUTORL_ATTEMPT >> code/starts; exec sleep 600\n", program=program)
    (run_id,) = cluster.prepare(["slow"], budget=HOUR)
    hold.touch()
    starts = cluster.workspace(run_id) / "code" / "starts"
    older = Hastened(cluster, run_id, look_s=600.0)
    wait_for(lambda: not hold.exists(), "the question for the version, which the newer one ends")
    newer = Hastened(cluster, run_id)
    assert older.wait() == 0, cluster.logs()
    wait_for(lambda: starts.exists() and starts.read_text() == "2\n", "the newer one's agent")
    newer.end_budget()
    assert newer.wait() == 0, cluster.logs()
    assert starts.read_text() == "2\n" and not agent_pids(cluster, run_id)
