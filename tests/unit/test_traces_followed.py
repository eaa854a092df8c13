"""Traces that grow while they are read: recorders that start anew, disks that fill up, logs that are cut."""

from __future__ import annotations

import errno
import json
import os
import random

import pytest
import tracedrun
from tracedrun import EXPECTED, LOGS, SAMPLES, Run, figures, moment

from autorl_hpc.recorder.traces import follow
from autorl_hpc.recorder.traces.totals import add_up
from autorl_hpc.recorder.watch import LineWriter
from autorl_hpc.records.recorded import Seen

run = tracedrun.run


def test_a_look_without_time_takes_something_all_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder that was stopped for the whole of a look must not find that there is nothing more."""
    monkeypatch.setattr(follow, "LOOK_S", -1.0)
    run.print((SAMPLES / "codex.log").read_bytes())
    recorder = run.recorder()
    recorder.close(moment(1.0))
    assert figures(add_up(run.events())) == EXPECTED["codex.log"]


def test_a_last_line_without_an_end_is_read_when_the_agent_has_ended(run: Run) -> None:
    data = (SAMPLES / "gemini_cli_document.log").read_bytes().rstrip(b"\n")
    run.print(data)
    recorder = run.recorder()
    recorder.look(moment(1.0))
    assert run.events() == []
    recorder.close(moment(2.0))
    assert figures(add_up(run.events())) == EXPECTED["gemini_cli_document.log"]
    run.print(b"\n" + (SAMPLES / "opencode.log").read_bytes())
    assert run.once().tokens_in == EXPECTED["gemini_cli_document.log"]["in"] + EXPECTED["opencode.log"]["in"]


@pytest.mark.parametrize("sample", LOGS)
def test_a_recorder_that_starts_anew_counts_nothing_twice(run: Run, sample: str) -> None:
    """It is killed after every few bytes: lines are cut anywhere, in the log and once in the trace."""
    data = (SAMPLES / sample).read_bytes()
    chance = random.Random(sample)
    at = 0
    while at < len(data):
        step = chance.randrange(1, 1500)
        run.print(data[at : at + step])
        at += step
        run.recorder().look(moment(float(at)))  # and never closed
        trace = run.run.recorded("trace")
        if chance.random() < 0.3 and trace.stat().st_size > 10:
            whole = trace.read_bytes()
            trace.write_bytes(whole[: -chance.randrange(1, 5)])
    assert figures(run.once()) == EXPECTED[sample]


class FullDisk(LineWriter):
    """A disk that has no room for the first writes."""

    failures = 2

    def add(self, *records: Seen) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().add(*records)


def test_what_could_not_be_written_is_written_later(run: Run) -> None:
    lines = (SAMPLES / "codex.log").read_bytes().splitlines(keepends=True)
    recorder = run.recorder()
    recorder._lines = FullDisk(run.run.recorded("trace"))
    for at, part in ((1.0, lines[:9]), (2.0, lines[9:12])):
        run.print(b"".join(part))
        with pytest.raises(OSError, match="No space"):
            recorder.look(moment(at))
    run.print(b"".join(lines[12:]))
    recorder.look(moment(3.0))
    recorder.close(moment(4.0))
    assert figures(add_up(run.events())) == EXPECTED["codex.log"]


def test_a_document_that_grows(run: Run) -> None:
    """After each message it is written anew, and now and then the recorder too is a new one."""
    whole = json.loads((SAMPLES / "mini.traj.json").read_text())
    path = run.put("mini.traj.json")
    recorder = run.recorder()
    for n in range(1, len(whole["messages"]) + 1):
        part = {**whole, "messages": whole["messages"][:n], "info": {**whole["info"], "exit_status": ""}}
        calls = [m["extra"] for m in part["messages"] if "response" in m.get("extra", {})]
        part["info"]["model_stats"] = {"instance_cost": sum(e["cost"] for e in calls), "api_calls": len(calls)}
        path.write_text(json.dumps(part)[: -1 if n == 4 else None])  # once half-written
        if n % 3 == 0:
            recorder = run.recorder()
        for each in recorder._documents.known.values():
            each.not_before = 0.0
        recorder.look(moment(float(n)))
    recorder.close(moment(50.0))
    assert figures(add_up(run.events())) == EXPECTED["mini.traj.json"]


def test_two_sessions_in_one_document_and_a_copy_of_it(run: Run) -> None:
    path = run.put("mini.traj.json")
    recorder = run.recorder()
    recorder.look(moment(1.0))
    run.put("mini.traj.json", "copy.traj.json")
    path.write_text(path.read_text().replace("chatcmpl", "other").replace("toolu", "tool2"))
    recorder.close(moment(2.0))
    totals = add_up(run.events())
    assert (totals.tokens_in, totals.driver_calls, totals.tool_calls) == (9800, 8, 8)
    assert totals.cost_usd == pytest.approx(0.12)


def test_a_log_that_became_shorter(run: Run) -> None:
    data = (SAMPLES / "codex.log").read_bytes()
    run.print(data)
    recorder = run.recorder()
    recorder.look(moment(1.0))
    with open(run.log, "r+b") as file:
        file.truncate(len(data) // 2)
    recorder.look(moment(2.0))
    run.print(b'\n{"type":"thread.started","thread_id":"t-3"}\n{"type":"turn.completed","usage":{"input_tokens":5}}\n')
    recorder.close(moment(3.0))
    totals = add_up(run.events())
    assert totals.tokens_in == 30005
    assert any(event.text and "shorter" in event.text for event in run.events() if event.kind == "position")
