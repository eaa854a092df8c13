"""A run with a log, the sessions that are stored as samples, and their totals, added up by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S

from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder.traces import follow
from autorl_hpc.recorder.traces.follow import Traces
from autorl_hpc.recorder.traces.totals import TraceTotals, add_up, read_events
from autorl_hpc.recorder.watch import Moment, Watch
from autorl_hpc.records.recorded import TraceEvent

SAMPLES = Path(__file__).parent / "traces"
LOGS = sorted(path.name for path in SAMPLES.glob("*.log"))
DOCUMENTS = {
    "mini.traj.json": ".home/.config/mini-swe-agent/last_mini_run.traj.json",
    "mini_1.traj.json": "run.traj.json",
    "openhands_state.json": ".home/.openhands/conversations/0d5e/base_state.json",
    "openhands_trajectory.json": "trajectories/trajectory.json",
}
NOON = "2026-01-01T00:10:00.000+00:00"


def moment(elapsed_s: float, at: str = NOON, attempt: int = 1) -> Moment:
    return Moment(elapsed_s=elapsed_s, at=at, attempt=attempt)


class Run:
    """A run with a log, a workspace, and recorders that come and go."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder / "run")
        self.workspace = folder / "ws"
        self.workspace.mkdir(parents=True)
        self.run.logs.mkdir(parents=True)
        self.log = self.run.agent_log
        self.log.touch()

    def recorder(self, trace_format: str | None = None) -> Traces:
        watch: type[Watch] = Traces
        assert watch.__name__ == "Traces"
        return Traces(self.run, self.workspace, self.log, trace_format)

    def print(self, data: bytes) -> None:
        with open(self.log, "ab") as file:
            file.write(data)

    def put(self, sample: str, name: str | None = None) -> Path:
        path = self.workspace / (name or DOCUMENTS[sample])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((SAMPLES / sample).read_bytes())
        return path

    def events(self) -> list[TraceEvent]:
        return read_events(self.run.recorded("trace"))

    def once(self, trace_format: str | None = None) -> TraceTotals:
        recorder = self.recorder(trace_format)
        recorder.look(moment(100.0))
        recorder.close(moment(101.0))
        return add_up(self.events())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """With looks that a busy machine may stop for longer than they are meant to take."""
    monkeypatch.setattr(follow, "LOOK_S", PATIENCE_S)
    monkeypatch.setattr(follow, "CLOSE_S", PATIENCE_S)
    return Run(tmp_path)


def figures(totals: TraceTotals) -> dict[str, Any]:
    return {
        "in": totals.tokens_in,
        "out": totals.tokens_out,
        "cached": totals.tokens_cached,
        "cost": None if totals.cost_usd is None else round(totals.cost_usd, 9),
        "calls": totals.driver_calls,
        "tools": totals.tool_calls,
        "failures": totals.tool_failures,
        "errors": totals.errors,
    }


EXPECTED: dict[str, dict[str, Any]] = {
    # The second result goes on from the first: in 70+500+3600+230, out 180+40. Messages: msg_1, msg_2, msg_3.
    # Tools: Bash (failed), Read, Write, Bash. Errors: the retry, and the synthetic message.
    "claude_code.log": {
        "in": 4400,
        "out": 220,
        "cached": 3600,
        "cost": 0.0625,
        "calls": 3,
        "tools": 4,
        "failures": 1,
        "errors": 2,
    },
    # t-1: the last total, 30000 and 200, not the sum with 24763; t-2 told none. Calls are not told.
    # Tools: item_1, item_2 (failed), item_3, item_4 (failed), and item_0 of the resumed process. Errors: item_5, `error`.
    "codex.log": {
        "in": 30000,
        "out": 200,
        "cached": 29000,
        "cost": None,
        "calls": None,
        "tools": 5,
        "failures": 2,
        "errors": 2,
    },
    # 5000 + 6000 and 100 + 150, one of them told twice; call_A failed.
    "codex_msg.log": {
        "in": 11000,
        "out": 250,
        "cached": 9000,
        "cost": None,
        "calls": 2,
        "tools": 2,
        "failures": 1,
        "errors": 0,
    },
    # In 8000 + 2500; out (9000 - 8000) + (3000 - 2500), thoughts among it: a resumed session begins anew.
    "gemini_cli.log": {
        "in": 10500,
        "out": 1500,
        "cached": 7000,
        "cost": None,
        "calls": None,
        "tools": 2,
        "failures": 1,
        "errors": 1,
    },
    # 900 + 1000 + 1100 + 1200; three commands, of which one failed. Errors: a 500 that was waited out, an answer without a command.
    "mini.log": {
        "in": 4200,
        "out": 63,
        "cached": 3000,
        "cost": None,
        "calls": 4,
        "tools": 3,
        "failures": 1,
        "errors": 2,
    },
    # In 10000+50+100, out 500+200+20, calls 3+1.
    "gemini_cli_document.log": {
        "in": 10150,
        "out": 720,
        "cached": 6000,
        "cost": None,
        "calls": 4,
        "tools": 5,
        "failures": 1,
        "errors": 0,
    },
    # In (100+900+50) + (150+1100), out (20+5) + (1300-1250); the shell call that returned 1 failed too.
    "opencode.log": {
        "in": 2300,
        "out": 75,
        "cached": 2000,
        "cost": 0.03,
        "calls": 2,
        "tools": 3,
        "failures": 2,
        "errors": 1,
    },
    # No tokens in the events. call_1 returned 2, call_3 was refused.
    "openhands.log": {
        "in": None,
        "out": None,
        "cached": None,
        "cost": None,
        "calls": None,
        "tools": 3,
        "failures": 2,
        "errors": 1,
    },
    # In 3000+400, out 200+50, cost 0.25+0.05, calls 3+1.
    "openhands_state.json": {
        "in": 3400,
        "out": 250,
        "cached": 2500,
        "cost": 0.3,
        "calls": 4,
        "tools": 0,
        "failures": 0,
        "errors": 0,
    },
    # The last total. Tools: run (2), edit; the error observation answers no call and counts as one that failed.
    "openhands_trajectory.json": {
        "in": 2500,
        "out": 120,
        "cached": 1700,
        "cost": 0.3,
        "calls": 2,
        "tools": 3,
        "failures": 2,
        "errors": 0,
    },
    # In 1000+1200+1300+1400, out 50+10+20+30, cached 400+1000+1200, cost 0.01+0.02+0.01+0.02. Error: the format error.
    "mini.traj.json": {
        "in": 4900,
        "out": 110,
        "cached": 2600,
        "cost": 0.06,
        "calls": 4,
        "tools": 4,
        "failures": 2,
        "errors": 1,
    },
    # Cost is told of the whole only.
    "mini_1.traj.json": {
        "in": 1600,
        "out": 100,
        "cached": None,
        "cost": 0.03,
        "calls": 2,
        "tools": 2,
        "failures": 1,
        "errors": 0,
    },
}
