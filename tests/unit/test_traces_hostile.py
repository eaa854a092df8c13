"""What an agent may write instead of a trace: no trajectories, endless lines, odd numbers, damaged samples."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import tracedrun
from tracedrun import DOCUMENTS, EXPECTED, LOGS, SAMPLES, Run, figures

from autorl_hpc.recorder.traces.totals import add_up
from autorl_hpc.records.recorded import TraceEvent

run = tracedrun.run


def test_files_that_are_no_trajectories(run: Run, tmp_path: Path) -> None:
    run.put("mini.traj.json", "models/base.traj.json")  # not looked into
    outside = tmp_path / "outside.traj.json"
    outside.write_bytes((SAMPLES / "mini.traj.json").read_bytes())
    (run.workspace / "link.traj.json").symlink_to(outside)
    (run.workspace / "linked").symlink_to(tmp_path)
    os.mkfifo(run.workspace / "fifo.traj.json")
    (run.workspace / "folder.traj.json").mkdir()
    (run.workspace / "deep.traj.json").write_text("[" * 200_000)
    (run.workspace / "list.traj.json").write_text("[1, 2]")
    (run.workspace / "odd.traj.json").write_text('{"messages": [1, null, []], "info": {"model_stats": []}}')
    with open(run.workspace / "big.traj.json", "wb") as file:
        file.truncate(1 << 40)
    assert run.once().tokens_in is None


def test_more_files_than_are_looked_at(run: Run) -> None:
    from autorl_hpc.recorder.traces import follow

    for n in range(follow.MAX_ENTRIES + 100):
        (run.workspace / f"{n}.txt").touch()
    assert follow.trajectories(run.workspace) == []


LONG = "x" * (5 * 1024 * 1024)


def test_long_lines_are_skipped_and_counted(run: Run) -> None:
    lines = (SAMPLES / "codex.log").read_bytes().splitlines(keepends=True)
    long = json.dumps({"type": "item.completed", "item": {"id": "i", "type": "agent_message", "text": LONG}}).encode()
    for line in lines:
        run.print(line + (long + b"\n" if line is lines[3] or line is lines[9] else b""))
    run.print(long)  # its end never comes
    totals = run.once()
    assert figures(totals) == EXPECTED["codex.log"] and totals.skipped == 2
    assert figures(run.once()) == EXPECTED["codex.log"], "and again by a new recorder"


def test_a_long_output_of_a_tool_is_read(run: Run) -> None:
    item = {
        "id": "i",
        "type": "command_execution",
        "command": "x",
        "aggregated_output": "y" * 3_000_000,
        "exit_code": 3,
    }
    run.print(json.dumps({"type": "item.completed", "item": item}).encode() + b"\n")
    assert run.once().tool_failures == 1 and len(run.events()[0].text or "") <= 500


NUMBERS = [
    "-5",
    "1e999",
    "NaN",
    "-Infinity",
    "true",
    '"12"',
    "null",
    "[1]",
    '{"a":1}',
    "12.5",
    "9" * 5000,
    "1" + "0" * 18,
]


@pytest.mark.parametrize("number", NUMBERS)
def test_what_is_no_number_of_tokens(run: Run, number: str) -> None:
    run.print(f'{{"type":"turn.completed","usage":{{"input_tokens":{number},"output_tokens":7}}}}\n'.encode())
    run.print(f'{{"type":"result","num_turns":1,"session_id":"s","total_cost_usd":{number}}}\n'.encode())
    totals = run.once()
    assert (totals.tokens_in, totals.tokens_out) == (None, 7)
    assert totals.cost_usd in (None, 12.5), "which is a number of dollars"


def test_odd_json(run: Run) -> None:
    run.print(b'{"type":"turn.completed","usage":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_002 + b"\n")
    run.print(b'{"type":"turn.completed","usage":' + b"[" * 2_000_000 + b"\n")
    run.print(b'{"type":[],"kind":{},"msg":{"type":[]},"id":1,"session_id":[],"sessionID":1,"action":[]}\n' * 3)
    run.print(b'{"type":"turn.completed","type":"turn.completed","usage":{"input_tokens":1,"input_tokens":3}}\n')
    run.print(b'\xff\xfe{"type":"turn.completed","usage":{"output_tokens":2}}\xff\n\x00\n')
    totals = run.once()
    assert (totals.tokens_in, totals.tokens_out) == (3, 2)


def test_an_object_over_many_lines_that_never_ends(run: Run) -> None:
    run.print(b"{\n" + b'  "a": 1,\n' * 1000 + (SAMPLES / "codex.log").read_bytes().split(b"\n", 1)[1])
    assert figures(run.once()) == EXPECTED["codex.log"]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Some bytes, tokens and lines changed, moved, doubled or lost."""
    made = bytearray(data)
    pieces = [
        b"null",
        b"-1",
        b"1e400",
        b"[]",
        b"{}",
        b'"',
        b"\\ud800",
        b"true",
        b"\n",
        b"\x00",
        b"9" * 30,
        b"[[[",
        b'""',
        b"NaN",
    ]
    for _ in range(chance.randrange(1, 25)):
        at, length = chance.randrange(len(made)), chance.randrange(1, 12)
        made[at : at + chance.choice((0, length))] = chance.choice(pieces)
    lines = bytes(made).split(b"\n")
    if chance.random() < 0.3:
        chance.shuffle(lines)
    return b"\n".join(lines)


def swapped(value: Any, chance: random.Random) -> Any:
    """The same shape with some values of another kind."""
    if chance.random() < 0.04:
        return chance.choice(
            [None, True, -1, 10**13, 1.5, "", "text", [], {}, [None], {"type": []}, "\ud800", [[]] * 3]
        )
    if isinstance(value, dict):
        return {key: swapped(each, chance) for key, each in value.items() if chance.random() > 0.02}
    return [swapped(each, chance) for each in value] if isinstance(value, list) else value


def sane(run: Run) -> None:
    totals = add_up(run.events(), ended_s=200.0)
    for number in (*figures(totals).values(), totals.tool_s, totals.driver_s, totals.last_driver_s):
        assert number is None or number >= 0
    rising = [tokens for _, tokens, _ in totals.points]
    assert rising == sorted(rising)
    for line in run.run.recorded("trace").read_bytes().splitlines():
        TraceEvent.model_validate_json(line)


@pytest.mark.parametrize("sample", [*LOGS, *DOCUMENTS])
def test_nothing_that_is_written_breaks_the_recorder(tmp_path: Path, sample: str) -> None:
    data = (SAMPLES / sample).read_bytes()
    chance = random.Random(f"fuzz {sample}")
    for n in range(60):
        run = Run(tmp_path / str(n))
        if sample in DOCUMENTS:
            value = json.dumps(swapped(json.loads(data), chance)).encode()
            run.put(sample).write_bytes(value if n % 2 else mutated(data, chance))
        elif n % 2:
            lines = [line for line in data.split(b"\n") if line.startswith(b"{") and line.endswith(b"}")]
            run.print(b"\n".join(json.dumps(swapped(json.loads(line), chance)).encode() for line in lines) + b"\n")
            run.print(b"\n".join(chance.sample(lines, len(lines))) + b"\n")
        else:
            run.print(mutated(data, chance) + b"\n")
        run.once()
        sane(run)
