"""Budgets in all currencies, warnings, the last grace, reprompts: agents that call a driver through their run's gateway."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Desk
from driver_server import DriverServer, Failure, Pace, Turn
from helpers import PATIENCE_S, VARIANTS, Cluster, alive, command_of, wait_for

from autorl_hpc.files.safe_open import read_calls
from autorl_hpc.records.driver import DriverSpec
from autorl_hpc.records.entries import DriverUse
from autorl_hpc.records.exchange import Progress
from autorl_hpc.records.experiment import Budget
from autorl_hpc.states import EndedBy, Fault
from autorl_hpc.supervise.attempt_ledger import Seals
from autorl_hpc.supervise.budget import (
    SUSPENSION_S,
    BudgetClock,
    BudgetLimits,
    BudgetUsed,
    Waits,
    gpus_of_job,
    read_clock,
)
from autorl_hpc.supervise.workspace import driver_environment

KEY = "the-real-key-of-the-driver"
TOKENS = 100
"""Of each answer, request included: at 10 dollars a million a tenth of a cent."""

CALLS = (
    "#!/usr/bin/env bash\nset -e\ncd $WORKSPACE\n"
    + VARIANTS
    + r"""
cat > code/call.py <<'END'
import json, os, sys, time, urllib.error, urllib.request
def call(text="hello"):
    body = {"model": os.environ["AUTORL_DRIVER_MODEL"], "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", data=json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
def calls(count):
    for _ in range(count):
        status, answer = call()
        with open("code/statuses", "a") as file:
            file.write(f"{status}\n")
        if status != 200:
            with open("code/refusal", "w") as file:
                json.dump(answer, file)
            return
def grace():
    while True:
        with open("time.json") as file:
            if (told := json.load(file))["grace"]:
                return told
        time.sleep(0.05)
END
does() { PYTHONPATH=code python3 -c "from call import *; $1"; }
"""
)
"""An agent's beginning: `does 'calls(3)'` asks the driver three times."""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[DriverServer]:
    with DriverServer(lambda _: Turn("hello", tokens_in=90, tokens_out=10), key=KEY) as server:
        yield server


def drivers(driver: DriverServer, tmp_path: Path, **fields: Any) -> dict[str, Any]:
    """The `drivers` of an experiment."""
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    return {"d": {"kind": "api", "url": driver.url, "model": "m", "key_file": str(key), **fields}}


def prepare(cluster: Cluster, driver: DriverServer, script: str, fields: Any = None, **changes: Any) -> str:
    """An experiment of one run whose agent has a driver."""
    cluster.agent("one", script, driver={"dialect": "openai-chat"}, **(fields or {}))
    prices = {"price_in": 10.0, "price_out": 10.0}
    changes["drivers"] = drivers(driver, cluster.root.path.parent, **prices)
    (run_id,) = cluster.prepare(["one"], **{**changes, "matrix": {"driver": "d", **changes.get("matrix", {})}})
    return run_id


def events(cluster: Cluster, run_id: str, kind: str) -> list[dict[str, Any]]:
    """The run's events of one kind."""
    lines = cluster.run_dir(run_id).events.read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def gateways(supervisor: subprocess.Popen[bytes]) -> list[int]:
    """Living gateways of a supervisor. The kernel may leave one out while another child ends."""
    found = []
    for task in Path(f"/proc/{supervisor.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread, or another child, that has just ended
            for pid in map(int, task.read_text().split()):
                if b"autorl_hpc.gateway" in command_of(pid) and alive(pid):
                    found.append(pid)
    return found


def wait_for_calls(cluster: Cluster, run_id: str, count: int) -> None:
    """Until so many requests have their last lines. A gateway writes them soon after the answers: of one that dies before, an estimate is
    counted."""

    def ended() -> bool:
        path = cluster.run_dir(run_id).driver_log
        return path.exists() and sum(not call.under_way for call in read_calls(path)) >= count

    wait_for(ended, what=f"the lines of {count} calls")


# ---------------------------------------------------------------- one part of the budget used up


def gateways_left(cluster: Cluster) -> list[int]:
    """Gateways that outlived their supervisors."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and alive(int(name)):
            try:
                parts = command_of(int(name)).split(b"\0")
                env = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if b"autorl_hpc.gateway" in parts and str(cluster.share).encode() in env:
                found.append(int(name))
    return found


def test_cost_out_closes_the_driver_and_leaves_a_grace_in_which_a_submission_counts(
    cluster: Cluster, driver: DriverServer
) -> None:
    script = (
        CALLS
        + "env > code/env\nvariants 0 1\ndoes 'calls(100); grace()'\n./submit output/v0 > code/answer\nsleep 600\n"
    )
    run_id = prepare(
        cluster, driver, script, budget={"wall_clock": "1h", "cost_usd": 0.01, "tokens": 10**6, "grace": "30s"}
    )
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    view, code = cluster.view(run_id), cluster.workspace(run_id) / "code"
    sealed = view.sealed
    assert sealed is not None and sealed.driver is not None
    assert (sealed.ended_by, sealed.fault, sealed.submissions) == (EndedBy.COST, None, (1,))
    assert "driver cost of the budget used up: $0.0100 of $0.0100" in str(sealed.reason)
    assert (sealed.driver.tokens_in, sealed.driver.tokens_out, sealed.driver.calls) == (900, 100, 10)
    assert sealed.driver.cost_usd == pytest.approx(0.01) and sealed.driver.refused >= 1
    assert (code / "statuses").read_text().split()[:10] == ["200"] * 10 and (code / "refusal").exists()
    assert len(driver.conversations) == 10, "what is refused never reaches the driver"
    shown = [{name.lower(): value for name, value in asked.headers.items()} for asked in driver.asked]
    assert {headers["authorization"] for headers in shown} == {f"Bearer {KEY}"}
    assert KEY not in (code / "env").read_text()
    assert json.loads((code / "answer").read_text())["status"] == "accepted"
    clock = read_clock(cluster.run_dir(run_id).clock)
    assert clock is not None and clock.progress.out_at_s is not None
    assert clock.progress.out_at_s < view.submissions[1].elapsed_s < sealed.elapsed_s
    assert sealed.elapsed_s >= clock.progress.out_at_s + 30.0
    told = [(event["budget"], event["percent"]) for event in events(cluster, run_id, "budget_warning")]
    assert told[-1] == ("cost_usd", 100)
    (out,) = events(cluster, run_id, "budget_out")
    assert out["out_of"] == "cost" and 0 < out["grace_s"] <= 30.0
    lines = (cluster.workspace(run_id) / "budget.log").read_text().splitlines()
    assert "the driver answers no more; 30 s are left to submit" in lines[-1]
    assert [event["ended_by"] for event in events(cluster, run_id, "agent_ended")] == ["cost"]
    assert not gateways_left(cluster)


def test_gpu_hours_and_submissions(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs by the job's own word; no driver, so that the sandbox has one way out and no gateway runs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    script = (
        CALLS
        + "env > code/env\nvariants 0 2\n./submit output/v0\n./submit output/v1 > code/second || true\n"
        + "does 'print(json.dumps(grace()))' > code/told\n"
        + 'curl -s $GRADING_SERVER_URL/time > code/time || python3 -c "import os, urllib.request as u; '
        + "print(u.urlopen(os.environ['GRADING_SERVER_URL'] + '/time').read().decode())\" > code/time\nsleep 600\n"
    )
    cluster.agent("one", script)
    budget = {"wall_clock": "400s", "gpu_hours": 60 / 3600, "max_submissions": 1}
    (run_id,) = cluster.prepare(["one"], budget=budget)
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    view, code = cluster.view(run_id), cluster.workspace(run_id) / "code"
    assert view.sealed is not None and view.sealed.driver is None
    assert (view.sealed.ended_by, view.sealed.submissions) == (EndedBy.GPU_HOURS, (1,))
    assert view.sealed.gpu_hours == pytest.approx(2 * view.sealed.elapsed_s / 3600)
    assert 30.0 <= view.sealed.elapsed_s <= 30.0 + 20.0 + 60.0
    assert json.loads((code / "second").read_text())["code"] == "too_many_submissions"
    assert "OPENAI" not in (code / "env").read_text()
    for name in ("told", "time"):
        told = json.loads((code / name).read_text())
        assert told["budgets"]["submissions"] == {"limit": 1, "used": 1, "left": 0}
        assert told["budgets"]["gpu_hours"]["left"] == 0 and told["grace"]["out_of"] == "gpu_hours"
        assert told["budgets"]["wall_clock_s"]["left"] > 50
    assert json.loads((code / "time").read_text())["remaining"] > 50
    told_of = {event["budget"] for event in events(cluster, run_id, "budget_warning")}
    assert told_of == {"submissions", "gpu_hours"}


# ---------------------------------------------------------------- deaths


def test_tokens_and_cost_carry_over_all_attempts(cluster: Cluster, driver: DriverServer) -> None:
    """A killed supervisor, a preempted one, and one whose agent ends: no token is lost and none is counted twice."""
    script = CALLS + "does 'calls(2)'\ntouch code/up-$AUTORL_ATTEMPT\n[ $AUTORL_ATTEMPT = 3 ] || sleep 600\n"
    script += "until [ -e budget.log ]; do sleep 0.1; done\nexit 4\n"  # it is told that half of its tokens are used
    run_id = prepare(cluster, driver, script, budget={"tokens": 1000})
    for attempt, end in ((1, signal.SIGKILL), (2, signal.SIGTERM)):
        supervisor = cluster.supervisor(run_id)
        wait_for((cluster.workspace(run_id) / "code" / f"up-{attempt}").exists, what="the agent's calls")
        wait_for_calls(cluster, run_id, 2 * attempt)
        supervisor.send_signal(end)
        assert supervisor.wait(PATIENCE_S) == (75 if end == signal.SIGTERM else -9), cluster.logs()
        wait_for(lambda: not gateways_left(cluster), what="the gateway's end")
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    sealed = cluster.view(run_id).sealed
    assert sealed is not None and sealed.driver is not None
    assert sealed.driver.cost_usd == pytest.approx(0.006)
    assert sealed.driver.model_copy(update={"cost_usd": None}) == DriverUse(tokens_in=540, tokens_out=60, calls=6)
    assert len(driver.conversations) == 6
    assert (sealed.ended_by, sealed.starts, sealed.reprompts) == (EndedBy.AGENT_EXIT, 3, 0)
    assert (sealed.exit_codes[0], sealed.exit_codes[2], sealed.exit_code) == (None, 4, 4)
    told = [event["percent"] for event in events(cluster, run_id, "budget_warning") if event["budget"] == "tokens"]
    assert told == [50], "a warning comes once, not once an attempt"


def test_a_killed_gateway_is_started_again_at_the_same_place_and_lets_nobody_else_in(
    cluster: Cluster, driver: DriverServer
) -> None:
    script = (
        CALLS
        + "does 'calls(1)'\necho \"$OPENAI_BASE_URL $OPENAI_API_KEY\" > code/.way && mv code/.way code/way\n"
        + "while [ ! -e code/killed ]; do sleep 0.05; done\ndoes 'calls(2)'\n"
    )
    run_id = prepare(cluster, driver, script)
    supervisor, code = cluster.supervisor(run_id), cluster.workspace(run_id) / "code"
    wait_for((code / "way").exists, what="the agent's first call")
    wait_for_calls(cluster, run_id, 1)
    url, token = (code / "way").read_text().split()
    assert [_status(url, other) for other in (KEY, token[:-1], "another-runs-token")] == [401] * 3
    (gateway,) = wait_for(lambda: gateways(supervisor), what="the gateway among its children")
    os.kill(gateway, signal.SIGKILL)
    (code / "killed").touch()  # it asks while there is none, and is answered by the next
    assert supervisor.wait(PATIENCE_S) == 0, cluster.logs()
    assert (code / "statuses").read_text().split() == ["200"] * 3
    assert len({event["port"] for event in events(cluster, run_id, "gateway_started")}) == 1
    (crash,) = events(cluster, run_id, "gateway_crashed")
    assert crash["exit_code"] == -9
    sealed = cluster.view(run_id).sealed
    assert sealed is not None and sealed.driver is not None and sealed.driver.calls == 3
    assert len(driver.conversations) == 3 and sealed.exit_code == 0


def _status(url: str, token: str) -> int:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", data=body)
    request.add_header("Authorization", f"Bearer {token}")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


# ---------------------------------------------------------------- prompts


def test_an_agent_that_ends_early_is_reprompted(cluster: Cluster) -> None:
    script = 'cd "$WORKSPACE"\ncat > code/told-$AUTORL_START\ntr "\\0" " " < /proc/$PPID/cmdline > code/argv\nexit 3\n'
    cluster.agent("one", script, prompt=True, resume="resume.sh")
    folder = cluster._frozen() / "templates" / "agents" / "one"
    (folder / "resume.sh").write_text(
        'cd "$WORKSPACE"\ncat > code/told-$AUTORL_START\n[ $AUTORL_START = 3 ] && kill -9 $$\nexit 0\n'
    )
    (run_id,) = cluster.prepare(["one"], reprompts=3, matrix={"mode": "rl-only"}, budget={"tokens": 5, "gpu_hours": 2})
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    sealed, workspace = cluster.view(run_id).sealed, cluster.workspace(run_id)
    assert sealed is not None and sealed.ended_by is EndedBy.AGENT_EXIT
    assert (sealed.starts, sealed.reprompts, sealed.exit_code) == (4, 3, 0)
    assert sealed.exit_codes[:2] == (3, 0) and sealed.exit_codes[2] in (-9, 137)
    first = (workspace / "code" / "told-1").read_text()
    assert first == (workspace / "prompt.md").read_text()
    assert "reinforcement learning only" in first and "- time: 1.00 hours" in first and "- GPU-hours: 2.00" in first
    assert "tokens" not in first, "this run has no driver"
    assert "$" not in first.replace("`$MODEL_PATH`", "")
    for number in (2, 3, 4):
        told = (workspace / "code" / f"told-{number}").read_text()
        assert told.startswith("You ended your work before your budget was used.")
        assert "0 submissions were accepted" in told and "- time: " in told
    assert "post-trains" not in (workspace / "code" / "argv").read_text()
    assert len(events(cluster, run_id, "reprompted")) == 3
    starts = events(cluster, run_id, "agent_started")
    assert [event["script"] for event in starts] == ["start.sh", "resume.sh", "resume.sh", "resume.sh"]


# ---------------------------------------------------------------- arithmetic


class Hand:
    """A budget that the test moves: a clock of 100 s with two GPUs, and a driver."""

    def __init__(self, tmp_path: Path, progress: Progress | None = None, **fields: Any) -> None:
        self.now_s, self.tokens, self.exhausted = 0.0, 0, None
        self.submissions = 0
        budget = Budget(wall_clock_s=100.0, grace_s=4.0, **fields)
        used = BudgetUsed(progress=progress or Progress())
        self.clock = BudgetClock(tmp_path / "clock.json", budget, 1, used, gpus=2, now=lambda: self.now_s)
        self.clock.resume()
        self.limits = BudgetLimits(
            self.clock,
            lambda: DriverUse(tokens_in=self.tokens, cost_usd=self.tokens / 1000),
            lambda: self.exhausted,
            lambda: self.submissions,
        )

    def at(self, now_s: float) -> list[tuple[str, int]]:
        while self.now_s < now_s:  # in steps that are no suspension
            self.now_s = min(now_s, self.now_s + 20.0)
            self.clock.tick()
        return [(warning.budget, warning.percent) for warning in self.limits.look()]


def test_warnings_come_once_and_the_grace_follows(tmp_path: Path) -> None:
    hand = Hand(tmp_path, gpu_hours=1.0)
    assert [hand.at(each) for each in (10, 49, 50, 51, 96)] == [
        [],
        [],
        [("wall_clock_s", 50)],
        [],
        [("wall_clock_s", 95)],
    ]
    assert hand.limits.over is None and hand.limits.grace_left_s == 4.0
    assert hand.at(100) == [("wall_clock_s", 100)]
    assert hand.limits.out_of is EndedBy.BUDGET and hand.limits.over is None
    assert hand.limits.told()["grace"] == {"out_of": "budget", "left_s": 4.0}
    hand.now_s = 104
    assert hand.limits.over is EndedBy.BUDGET


def test_the_first_part_that_is_used_up_ends_the_run(tmp_path: Path) -> None:
    hand = Hand(tmp_path, tokens=1000, cost_usd=0.5, max_submissions=2)
    hand.submissions = 2
    assert hand.at(1) == [("submissions", 100)] and hand.limits.out_of is None
    hand.tokens = 499
    assert hand.at(2) == [("cost_usd", 95)]
    hand.tokens = 1200
    assert hand.at(3) == [("tokens", 100), ("cost_usd", 100)]
    assert hand.limits.out_of is EndedBy.TOKENS and hand.limits.over is None
    hand.now_s = 7.0
    assert hand.limits.over is EndedBy.TOKENS
    # The next attempt knows: its agent gets no second grace and no second warning.
    later = Hand(tmp_path, hand.clock.progress, tokens=1000, cost_usd=0.5, max_submissions=2)
    later.tokens, later.submissions = 1200, 2
    assert later.at(7.0) == [] and later.limits.over is EndedBy.TOKENS


def test_a_part_that_is_used_up_in_the_grace_changes_nothing(tmp_path: Path) -> None:
    hand = Hand(tmp_path, tokens=1000, cost_usd=1.2)
    hand.tokens = 1100
    hand.at(2)
    hand.tokens = 1300
    assert hand.at(3) == [("cost_usd", 100)]
    assert hand.limits.out_of is EndedBy.TOKENS and hand.limits.grace_left_s == pytest.approx(3.0)


def test_the_clock_counts_intervals_and_gpus_and_no_suspension(tmp_path: Path) -> None:
    hand = Hand(tmp_path, gpu_hours=1.0, give_back_after_s=60.0, give_back_cap_s=50.0)
    clock = hand.clock
    hand.now_s = SUSPENSION_S
    assert (clock.elapsed_s, clock.used.gpu_s) == (SUSPENSION_S, 2 * SUSPENSION_S)
    hand.now_s += SUSPENSION_S + 0.01  # a stopped job
    assert (clock.elapsed_s, clock.used.gpu_s) == (SUSPENSION_S, 2 * SUSPENSION_S)
    clock.give_back(10.0)
    assert clock.used.gpu_s == 2 * SUSPENSION_S - 20.0, "waiting for a grader is given back in this currency too"
    clock.stop()
    hand.now_s += 5
    assert clock.elapsed_s == SUSPENSION_S, "what follows the end costs nothing"
    kept = read_clock(tmp_path / "clock.json")
    assert kept is not None and kept.suspended_s == pytest.approx(SUSPENSION_S + 0.01)
    later = BudgetClock(tmp_path / "c", clock.budget, 2, clock.used, gpus=1)
    assert (later.elapsed_s, later.used.given_back_s, later.left_s) == (SUSPENSION_S, 10.0, 110.0 - SUSPENSION_S)


@pytest.mark.parametrize(
    ("gap_s", "noted_s", "counted_s"), [(20, 0, 20), (45, 0, 0), (45, 55, 45), (45, 25, 15), (45, 999, 45)]
)
def test_a_gap_is_a_suspension_only_where_the_keeper_stood_still_too(
    tmp_path: Path, gap_s: float, noted_s: float, counted_s: float
) -> None:
    """Catches a clock that an agent freezes by holding up its supervisor, as by leases on files that it opens: 13.6 s of 416 s were
    charged. The keeper noted `noted_s`, of which 10 s were known."""
    note, now = tmp_path / "elapsed-1.json", [0.0]
    budget = Budget(wall_clock_s=1000.0)
    clock = BudgetClock(tmp_path / "c", budget, 1, gpus=2, note=note, now=lambda: now[0])
    clock.resume()
    now[0] = 10.0
    clock.tick()
    note.write_text(f'{{"elapsed_s": {noted_s:15.3f}}}')
    now[0] += gap_s
    assert (clock.elapsed_s, clock.used.gpu_s) == (10.0 + counted_s, 2 * (10.0 + counted_s))
    assert clock.used.suspended_s == gap_s - counted_s


def test_waiting_beyond_the_free_minute_is_given_back_up_to_the_cap(tmp_path: Path) -> None:
    clock = BudgetClock(
        tmp_path / "clock.json",
        Budget(wall_clock_s=100.0, give_back_after_s=60.0, give_back_cap_s=50.0),
        1,
    )
    assert [clock.give_back(seconds) for seconds in (0.0, 30.0, 30.0, 30.0)] == [0.0, 30.0, 20.0, 0.0]
    assert clock.left_s == pytest.approx(150.0)


def test_a_wait_passes_once_however_many_wait() -> None:
    now = [0.0]
    waits = Waits(60.0, now=lambda: now[0])
    given: list[float] = []
    flood = {f"s{i}" for i in range(450)}
    for second, pending, claimed in [
        (0, flood, set()),
        (25, flood, set()),
        (50, flood, set()),  # still in the free minute
        (70, flood, set()),  # ten seconds beyond it
        (100, flood, set()),
        (130, flood, {"s3"}),  # a grader works on this run: what waits, waits behind its own
        (160, flood - {"s3"}, set()),
        (190, set(), set()),
        (200, {"late"}, set()),
        (1200, {"late"}, set()),  # suspended: that time wasn't counted, so nothing of it comes back
        (1220, {"late"}, set()),  # twenty seconds of waiting so far
    ]:
        now[0] = float(second)
        given.append(waits.look(pending, claimed))
    assert given == [0.0, 0.0, 0.0, 10.0, 30.0, 0.0, 30.0, 0.0, 0.0, 0.0, 0.0]


def test_a_later_submission_takes_no_waiting_away() -> None:
    now = [0.0]
    waits = Waits(60.0, now=lambda: now[0])
    given = []
    for second, pending in [(0, {"a"}), (30, {"a"}), (60, {"a"}), (70, {"a"}), (80, {"a", "b"})]:
        now[0] = float(second)
        given.append(waits.look(pending, set()))
    assert given == [0.0, 0.0, 0.0, 10.0, 10.0]


def test_a_lost_attempt_is_charged_what_its_agent_ran(tmp_path: Path) -> None:
    """Everything was killed 12 s after the clock's last write; the keeper had noted how long the agent ran."""
    desk = Desk(tmp_path, gpu_hours=1.0)
    seals = Seals(desk.experiment, desk.record, desk.intake.chain)
    used = BudgetUsed(30.0, gpu_s=60.0)
    clock = BudgetClock(desk.run.clock, desk.record.science.budget, 1, used, gpus=2)
    clock.persist()
    seals.elapsed_file(1).write_text('{"elapsed_s": 42.0}')
    used = seals.used_so_far(desk.intake.chain.look())
    assert (used.elapsed_s, used.gpu_s) == (42.0, 84.0)


@pytest.mark.parametrize(
    ("outer", "count"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,5"}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5e1,MIG-7", "SLURM_JOB_GPUS": "0"}, 2),
        ({"SLURM_JOB_GPUS": "0-3"}, 4),
        ({}, 2),
        ({"SLURM_JOB_ID": "7"}, 0),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0"}, 1),
    ],
)
def test_gpus_of_a_job(tmp_path: Path, outer: dict[str, str], count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus_of_job(outer, str(tmp_path)) == count


def test_the_agents_variables_hold_no_key_and_every_dialect_leads_to_the_gateway() -> None:
    spec = DriverSpec(
        kind="api",
        url="https://api.example.org/v1",
        model="m",
        key_variable="SOME_KEY",
        context_tokens=8192,
        parameters={"temperature": 0.5},
    )
    env = driver_environment(spec, "http://127.0.0.1:5", "token")
    assert {name: value for name, value in env.items() if name.endswith("_KEY")} == dict.fromkeys(
        ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"), "token"
    )
    assert {env[name] for name in env if "BASE" in name} == {"http://127.0.0.1:5", "http://127.0.0.1:5/v1"}
    assert json.loads(env["AUTORL_DRIVER_PARAMETERS"]) == {"temperature": 0.5}
    assert env["AUTORL_DRIVER_CONTEXT_TOKENS"] == "8192" and "AUTORL_DRIVER_MAX_OUTPUT_TOKENS" not in env
    assert "api.example.org" not in json.dumps(env)


def test_a_key_that_is_refused_starts_no_clock_and_a_corrected_one_goes_on(
    cluster: Cluster, driver: DriverServer
) -> None:
    """The agent got 0 for it, though the gateway knew. One request an experiment: the second run asks nothing."""
    script = CALLS + "does 'calls(1)'\n"
    cluster.agent("one", script, driver={"dialect": "openai-chat"})
    given = drivers(driver, cluster.root.path.parent)
    first, second = cluster.prepare(["one"], matrix={"driver": "d", "seed": [0, 1]}, drivers=given)
    key = cluster.root.path.parent / "key"
    key.write_text("sk-another-key")
    supervisor = cluster.supervisor(first)
    place = cluster.experiment.drivers / "d.json"
    told = wait_for(lambda: place.exists() and json.loads(place.read_text()), what="the driver's word")
    assert told["state"] == "failed" and "refuses the key of this experiment (401" in told["problem"]
    shown = cluster.run("status", str(cluster.experiment.path)).stdout
    assert "refuses the key of this experiment" in " ".join(shown.split())
    assert not cluster.run_dir(first).clock.exists() and driver.asked == [] and len(driver.probed) == 1
    key.write_text(KEY)
    assert supervisor.wait(PATIENCE_S) == 0, cluster.logs()
    assert cluster.supervisor(second).wait(PATIENCE_S) == 0, cluster.logs()
    told = json.loads(place.read_text())
    assert told["state"] == "ready"
    assert re.fullmatch(r"one request to prove the key: \d+ tokens in, \d+ out", told["said"]), told
    assert len(driver.probed) == 2 and len(driver.asked) == 2
    sealed = [cluster.view(run).sealed for run in (first, second)]
    assert [(s.fault, s.driver.calls) for s in sealed if s and s.driver] == [(None, 1), (None, 1)]


def test_a_driver_that_is_lost_is_the_clusters_fault_and_the_run_goes_on(
    cluster: Cluster, driver: DriverServer
) -> None:
    """A key that is taken back while the agent works; with the next attempt it is there again."""
    script = CALLS + "does 'calls(1)'\ntouch code/began\nuntil [ -e code/go ]; do sleep 0.1; done\ndoes 'calls(1)'\n"
    script += "grep -q 401 code/statuses && [ $AUTORL_ATTEMPT = 1 ] && exit 1; exit 0\n"
    run_id = prepare(cluster, driver, script, attempts=2)
    code = cluster.workspace(run_id) / "code"
    supervisor = cluster.supervisor(run_id)
    wait_for((code / "began").exists, what="its first call")
    driver.key = "another"
    (code / "go").touch()
    assert supervisor.wait(PATIENCE_S) == 75, cluster.logs()
    (ended,) = cluster.view(run_id).ended
    assert "the driver was lost: the last 1 requests failed" in ended.reason and "driver_key" in ended.reason
    driver.key = KEY
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    sealed = cluster.view(run_id).sealed
    assert sealed is not None and (sealed.ended_by, sealed.exit_code, sealed.fault) == (EndedBy.AGENT_EXIT, 0, None)


def test_a_driver_that_hangs_until_the_budgets_end_is_the_clusters_fault(
    cluster: Cluster, driver: DriverServer
) -> None:
    """No request fails then, and the agent got 0 for it."""
    driver.script = [Pace(Turn("late"), after_s=600)]
    run_id = prepare(cluster, driver, CALLS + "does 'calls(1)'\n", budget={"wall_clock": "12s"})
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    sealed = cluster.view(run_id).sealed
    assert sealed is not None and (sealed.ended_by, sealed.fault) == (EndedBy.BUDGET, Fault.CLUSTER)
    assert "requests were without an answer for" in str(sealed.reason)


def test_a_driver_that_stays_lost_leaves_a_run_that_does_not_count(cluster: Cluster, driver: DriverServer) -> None:
    script = CALLS + "touch code/began\nuntil [ -e code/go ]; do sleep 0.1; done\ndoes 'calls(1)'; exit 1\n"
    run_id = prepare(cluster, driver, script, attempts=1)
    code = cluster.workspace(run_id) / "code"
    supervisor = cluster.supervisor(run_id)
    wait_for((code / "began").exists, what="the agent")
    driver.key = "another"
    (code / "go").touch()
    assert supervisor.wait(PATIENCE_S) == 75, cluster.logs()
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    sealed = cluster.view(run_id).sealed
    assert sealed is not None and (sealed.ended_by, sealed.fault) == (EndedBy.CRASHED, Fault.CLUSTER)
    assert "the driver was lost" in str(sealed.reason)


@pytest.mark.parametrize("status", [429, 402])
def test_a_driver_that_answers_us_is_not_lost_whatever_an_agent_brings_about(
    cluster: Cluster, driver: DriverServer, status: int
) -> None:
    """Requests that a driver refuses, or too many at once, and an exit: a bad run would not count."""
    driver.script = lambda conversation: Failure(status, message="insufficient_quota, billing, no such model")
    script = CALLS + "does 'calls(1); calls(1); calls(1)'; exit 1\n"
    run_id = prepare(cluster, driver, script, attempts=1)
    assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    sealed = cluster.view(run_id).sealed
    assert sealed is not None and (sealed.ended_by, sealed.fault) == (EndedBy.AGENT_EXIT, Fault.AGENT)
    assert len(driver.probed) == 2
