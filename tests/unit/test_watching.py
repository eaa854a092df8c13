"""What ended an agent: seen also where the agent is gone before anybody looked."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autorl_hpc.files import atomic
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.records.driver import DriverSpec
from autorl_hpc.records.experiment import Budget
from autorl_hpc.states import EndedBy
from autorl_hpc.supervise.agent_keeper import AgentProcess
from autorl_hpc.supervise.budget import BudgetClock, BudgetLimits, read_clock
from autorl_hpc.supervise.children import GatewayProcess
from autorl_hpc.supervise.supervisor import AgentRun
from autorl_hpc.supervise.usage_watch import UsageWatch

LATE_S = 1.0
"""After the agent's end the gateway's line comes: much later than at once, as on a busy node."""


class Late(GatewayProcess):
    """A gateway whose process says one line before it answers its first question."""

    line: dict[str, Any] | None = None
    says: threading.Timer

    def send(self, value: dict[str, Any]) -> Any:
        if "ping" in value:
            self.says = threading.Timer(LATE_S, self._speak, [value["ping"]])
            self.says.start()
        self._process = cast(Any, self)  # somebody lives who takes it
        return self._process

    def _speak(self, number: int) -> None:
        for line in (self.line, {"pong": number}):
            self._take(json.dumps(line).encode())


class Here(ExperimentDir):
    """An experiment whose run lies in it."""

    def run(self, run_id: str) -> RunDir:
        return RunDir(self.path / run_id)


class Ends:
    """An agent that asks its driver, is answered, and ends at once, between two looks."""

    looks = 0

    def running(self) -> bool:
        self.looks += 1
        return self.looks < 2


@pytest.mark.parametrize(
    ("line", "ended_by"),
    [
        ({"tokens_in": 1000, "tokens_out": 1, "calls": 3, "exhausted": "tokens"}, EndedBy.TOKENS),
        ({"tokens_in": 1000, "tokens_out": 0, "calls": 3, "exhausted": None}, EndedBy.TOKENS),
        ({"tokens_in": 990, "tokens_out": 0, "calls": 3, "exhausted": "tokens"}, EndedBy.TOKENS),
        ({"tokens_in": 990, "tokens_out": 0, "calls": 3, "exhausted": None}, EndedBy.AGENT_EXIT),
    ],
)
def test_an_agent_that_ends_with_its_last_answer_used_its_budget_up(
    tmp_path: Path, line: dict[str, Any], ended_by: EndedBy
) -> None:
    """The 3rd: a refusal that says the budget is over, by the gateway's word; no reprompt follows, since `ended_by` is no exit."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    budget = Budget(wall_clock_s=3600.0, tokens=1000, grace_s=60.0)
    clock = BudgetClock(tmp_path / "clock.json", budget, 1)
    spec = DriverSpec(kind="api", url="https://api.example.org/v1", model="m")
    gateway = Late(ExperimentDir(tmp_path), run, "d", spec, clock, tmp_path / "socket")
    gateway.line = line
    limits = BudgetLimits(clock, gateway.use, lambda: gateway.exhausted)
    stops, record, none = SimpleNamespace(asked=False), SimpleNamespace(run_id="run"), cast(Any, None)
    parts = (cast(Any, stops), limits, none, gateway, none, none)
    watching = AgentRun(Here(tmp_path), cast(Any, record), none, tmp_path, list, {}, "mark", *parts)
    watching._next_look = float("inf")
    agent = Ends()
    usage = cast(UsageWatch, SimpleNamespace(excess=None))
    assert watching.until_end(cast(AgentProcess, agent), usage) is ended_by
    gateway.says.join()
    assert limits.out_of is (None if ended_by is EndedBy.AGENT_EXIT else ended_by)
    events = run.events.read_text() if run.events.exists() else ""
    assert ("budget_out" in events) == (ended_by is EndedBy.TOKENS)


def test_an_older_state_is_never_written_over_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = BudgetClock(tmp_path / "clock.json", Budget(wall_clock_s=100.0), 1)
    write, second = atomic.write_bytes, threading.Thread(target=clock.persist)

    def slowly(*arguments: Any) -> None:
        if second.ident is None:  # the first write lasts
            second.start()
            second.join(0.3)
        write(*arguments)

    monkeypatch.setattr(atomic, "write_bytes", slowly)
    clock.persist()
    second.join()
    found = read_clock(tmp_path / "clock.json")
    assert found is not None and found.counter == 2
