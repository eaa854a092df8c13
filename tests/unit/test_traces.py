"""Agents' traces: each format from one whole session, totals added up by hand; logs that grow, break or are hostile."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S

from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder.traces.follow import Traces
from autorl_hpc.recorder.traces.totals import TraceTotals, add_up
from autorl_hpc.recorder.usage import Sweep
from autorl_hpc.recorder.watch import Moment
from autorl_hpc.records.recorded import TraceEvent

SAMPLES = Path(__file__).parent / "traces"
LOGS = sorted(path.name for path in SAMPLES.glob("*.log"))
DOCUMENTS = {
    "mini.traj.json": ".home/.config/mini-swe-agent/last_mini_run.traj.json",
    "openhands_state.json": ".home/.openhands/conversations/0d5e/base_state.json",
}
NOON = "2026-01-01T00:10:00.000+00:00"
FIGURES = ("tokens_in", "tokens_out", "tokens_cached", "cost_usd", "driver_calls", "tool_calls", "tool_failures")
EXPECTED: dict[str, tuple[Any, ...]] = {
    # The second result goes on from the first: in 70+500+3600+230, out 180+40. Messages: msg_1, msg_2, msg_3.
    # Tools: Bash (failed), Read, Write, Bash. Errors: the retry, and the synthetic message.
    "claude_code.log": (4400, 220, 3600, 0.0625, 3, 4, 1, 2),
    # t-1: the last total, 30000 and 200, not the sum with 24763; t-2 told none. Calls are not told.
    # Tools: item_1, item_2 (failed), item_3, item_4 (failed), and item_0 of the resumed process. Errors: item_5, `error`.
    "codex.log": (30000, 200, 29000, None, None, 5, 2, 2),
    # By Codex 0.30's protocol: the last of two totals; call_3 returned 1, call_4's server was gone. Error: the stream's.
    "codex_old.log": (12000, 180, 10000, None, None, 4, 2, 1),
    # In 8000 + 2500; out (9000 - 8000) + (3000 - 2500), thoughts among it: a resumed session begins anew.
    "gemini_cli.log": (10500, 1500, 7000, None, None, 2, 1, 1),
    # 900 + 1000 + 1100 + 1200; three commands, of which one failed. Errors: a 500 that was waited out, an answer without a command.
    "mini.log": (4200, 63, 3000, None, 4, 3, 1, 2),
    # In 10000+50+100, out 500+200+20, calls 3+1.
    "gemini_cli_document.log": (10150, 720, 6000, None, 4, 5, 1, 0),
    # In (100+900+50) + (150+1100), out (20+5) + (1300-1250); the shell call that returned 1 failed too.
    "opencode.log": (2300, 75, 2000, 0.03, 2, 3, 2, 1),
    # No tokens in the events. call_1 returned 2, call_3 was refused.
    "openhands.log": (None, None, None, None, None, 3, 2, 1),
    # In 3000+400, out 200+50, cost 0.25+0.05, calls 3+1.
    "openhands_state.json": (3400, 250, 2500, 0.3, 4, 0, 0, 0),
    # In 1000+1200+1300+1400, out 50+10+20+30, cached 400+1000+1200, cost 0.01+0.02+0.01+0.02. Error: the format error.
    "mini.traj.json": (4900, 110, 2600, 0.06, 4, 4, 2, 1),
}
"""By sample: FIGURES, and the number of errors."""


def moment(elapsed_s: float, at: str = NOON) -> Moment:
    return Moment(elapsed_s, at, 1)


class Run:
    """A run with a log, a workspace, and recorders that come and go."""

    def __init__(self, folder: Path) -> None:
        self.run, self.workspace = RunDir(folder / "run"), folder / "ws"
        self.workspace.mkdir(parents=True)
        self.run.logs.mkdir(parents=True)
        self.log = self.run.agent_log
        self.log.touch()

    def recorder(self, trace_format: str | None = None, look_s: float = PATIENCE_S) -> Traces:
        self.sweep = Sweep(self.workspace, slice_s=PATIENCE_S)
        return Traces(self.run, self.sweep, trace_format, look_s, PATIENCE_S)

    def print(self, data: bytes) -> None:
        with open(self.log, "ab") as file:
            file.write(data)

    def put(self, sample: str, name: str | None = None) -> Path:
        path = self.workspace / (name or DOCUMENTS[sample])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((SAMPLES / sample).read_bytes())
        return path

    def add(self, sample: str) -> None:
        if sample in DOCUMENTS:
            self.put(sample)
        else:
            self.print((SAMPLES / sample).read_bytes())

    def events(self) -> list[TraceEvent]:
        path = self.run.recorded("trace")
        return [TraceEvent.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []

    def totals(self) -> TraceTotals:
        return add_up(self.events(), ended_s=200.0)

    def figures(self) -> tuple[Any, ...]:
        events = self.events()
        values = [getattr(add_up(events), name) or 0 for name in FIGURES]
        return *(round(value, 9) for value in values), sum(event.kind == "error" for event in events)

    def once(self, trace_format: str | None = None) -> TraceTotals:
        recorder = self.recorder(trace_format)
        recorder.look(moment(100.0))
        recorder.close(moment(101.0))
        return self.totals()


def expected(sample: str) -> tuple[Any, ...]:
    return tuple(value or 0 for value in EXPECTED[sample])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize("sample", EXPECTED)
def test_a_whole_session_adds_up(run: Run, sample: str) -> None:
    run.add(sample)
    totals = run.once()
    assert run.figures() == expected(sample)
    assert (totals.tokens_in is None) == (EXPECTED[sample][0] is None), "what was not told is null"


@pytest.mark.parametrize("sample", ["claude_code.log", "mini.traj.json"])
def test_the_agents_definition_names_the_format(run: Run, tmp_path: Path, sample: str) -> None:
    name = sample.partition(".")[0]
    other = Run(tmp_path / "other")
    run.add(sample)
    other.add(sample)
    run.once(name.replace("_", "-"))
    assert run.figures() == expected(sample)
    assert other.once("codex" if name != "codex" else "opencode").sessions == 0, "another format is not looked for"


def test_all_formats_in_one_log_among_other_output(run: Run) -> None:
    """An agent may call others: each adds its own. Prefixes, colours, carriage returns, and lines that only look like a trace."""
    samples = ["claude_code.log", "codex.log", "gemini_cli.log", "opencode.log", "mini.log"]
    for sample in samples:
        for line in (SAMPLES / sample).read_bytes().splitlines():
            run.print(
                b"{'loss': 0.5}\r\n[12:00:01] \x1b[32mINFO\x1b[0m {agent} " + line + b"  \r\n" + b'{"type": "x"\n'
            )
    run.once()
    for at in (0, 1, 2, 5, 6, 7):
        assert run.figures()[at] == sum(EXPECTED[sample][at] for sample in samples), at


def test_secrets_are_masked_and_commands_kept(run: Run) -> None:
    for sample in ("claude_code.log", "codex.log"):
        run.print((SAMPLES / sample).read_bytes())
    run.put("mini.traj.json")
    run.once()
    text = run.run.recorded("trace").read_text()
    for secret in ("q9Zr7LmX2vTb8Kc4", "abcdef123456", "hf_abcdefghijklmnopqrst"):
        assert secret not in text
    commands = [event.command for event in run.events() if event.command]
    assert "ls -la data && WANDB_API_KEY=*** wandb login" in commands
    assert "bash -lc 'python code/train.py --hub-token ***'" in commands
    assert "export HF_TOKEN=***; python x.py" in commands
    assert "/ws/code/train.py" in commands and "/ws/instructions.md" not in commands, "read files are not commands"


def test_texts_are_escaped(run: Run) -> None:
    bad = "\x1b]0;owned\x07\u202e\ud800 \x00"
    line = {"type": "thread.started", "thread_id": bad}
    item = {"type": "command_execution", "id": bad, "command": bad + "\nls", "exit_code": 1, "status": "failed"}
    item["aggregated_output"] = bad
    for each in (line, {"type": "item.started", "item": item}, {"type": "item.completed", "item": item}):
        run.print(json.dumps(each).encode() + b"\n")
    run.once()
    assert run.totals().tool_failures == 1
    for event in run.events():
        assert all(
            part is None or part.isprintable() for part in (event.session, event.call_id, event.command, event.text)
        )


def test_times_of_the_driver(run: Run) -> None:
    """Looks at 10, 20, ... s. The driver works from 10 to 20, two tools from 20 to 40, the driver from 40 to 50."""
    lines = (SAMPLES / "codex.log").read_bytes().splitlines(keepends=True)
    recorder = run.recorder()
    parts = ((10.0, lines[1:3]), (20.0, lines[3:6]), (30.0, lines[6:7]), (40.0, lines[7:8]), (50.0, lines[12:14]))
    for at, part in parts:
        run.print(b"".join(part))
        recorder.look(moment(at))
    recorder.close(moment(55.0))
    totals = run.totals()
    assert totals.driver_spans == ((10.0, 20.0), (40.0, 50.0))
    assert [totals.tokens_at(s) for s in (0.0, 49.9, 50.0, 1e9)] == [0, 0, 24885, 24885]


def test_the_traces_own_times_count_between_two_looks_and_the_output_s_stamps_more(run: Run) -> None:
    """Looks at 100 s and 110 s of budget, the second at 00:00:07 by the clock: the stamps of 00:00:03 and later count."""
    recorder = run.recorder()
    recorder.look(moment(100.0, "2026-01-01T00:00:00.000+00:00"))
    run.print((SAMPLES / "gemini_cli.log").read_bytes())
    edge = run.log.stat().st_size
    recorder.look(moment(110.0, "2026-01-01T00:00:07.000+00:00"))
    lines = (SAMPLES / "codex.log").read_bytes().splitlines(keepends=True)
    run.print(b"".join(lines[:4]))
    run.run.agent_times.write_text(f"{edge} 90 {NOON}\n{run.log.stat().st_size} 112.5 {NOON}\n")
    recorder.close(moment(120.0, "2026-01-01T00:00:17.000+00:00"))
    at = {event.call_id or event.kind: event.elapsed_s for event in run.events() if event.kind != "tool_result"}
    assert at["run_shell_command-1"] == pytest.approx(106.0)
    assert at["end"] == 110.0, "a stamp after the look"
    assert [event.elapsed_s for event in run.events() if event.kind == "session"] == [
        pytest.approx(103.0),
        110.0,
        112.5,
    ]


# ---------------------------------------------------------------- traces that grow, disks that fill up, recorders that start anew


def test_a_last_line_without_an_end_is_read_when_the_agent_has_ended(run: Run) -> None:
    data = (SAMPLES / "gemini_cli_document.log").read_bytes().rstrip(b"\n")
    run.print(data)
    recorder = run.recorder()
    recorder.look(moment(1.0))
    assert run.events() == []
    recorder.close(moment(2.0))
    assert run.figures() == expected("gemini_cli_document.log")
    run.print(b"\n" + (SAMPLES / "opencode.log").read_bytes())
    assert run.once().tokens_in == EXPECTED["gemini_cli_document.log"][0] + EXPECTED["opencode.log"][0]


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
        if chance.random() < 0.3 and trace.exists() and trace.stat().st_size > 10:
            whole = trace.read_bytes()
            trace.write_bytes(whole[: -chance.randrange(1, 5)])
    run.once()
    assert run.figures() == expected(sample)


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
        run.sweep.look(moment(float(n)))
        recorder.look(moment(float(n)))
    recorder.close(moment(50.0))
    assert run.figures() == expected("mini.traj.json")


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
    totals = run.totals()
    assert totals.tokens_in == 30005
    assert any(event.text and "shorter" in event.text for event in run.events() if event.kind == "position")


# ---------------------------------------------------------------- what an agent may write instead of a trace


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


LONG = "x" * (5 * 1024 * 1024)


def test_long_lines_are_skipped_and_counted(run: Run) -> None:
    lines = (SAMPLES / "codex.log").read_bytes().splitlines(keepends=True)
    long = json.dumps({"type": "item.completed", "item": {"id": "i", "type": "agent_message", "text": LONG}}).encode()
    for line in lines:
        run.print(line + (long + b"\n" if line is lines[3] or line is lines[9] else b""))
    run.print(long)  # its end never comes
    assert run.once().skipped == 2 and run.figures() == expected("codex.log")
    run.once()
    assert run.figures() == expected("codex.log"), "and again by a new recorder"


NUMBERS = [
    *("-5", "1e999", "NaN", "-Infinity", "true", '"12"', "null", "[1]", '{"a":1}', "12.5", "9" * 5000),
    *("1" + "0" * 18,),
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


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Some bytes, tokens and lines changed, moved, doubled or lost."""
    made = bytearray(data)
    pieces = [
        *(b"null", b"-1", b"1e400", b"[]", b"{}", b'"', b"\\ud800", b"true", b"\n", b"\x00", b"9" * 30),
        *(b"[[[", b'""', b"NaN"),
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


@pytest.mark.parametrize("sample", [*LOGS, *DOCUMENTS])
def test_nothing_that_is_written_breaks_the_recorder(tmp_path: Path, sample: str) -> None:
    data = (SAMPLES / sample).read_bytes()
    chance = random.Random(f"fuzz {sample}")
    for n in range(8):
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
        totals = run.once()
        assert all(number >= 0 for number in run.figures())
        for rising in zip(*totals.points, strict=True):
            assert all(b >= a - 1e-9 for a, b in itertools.pairwise(rising))
        assert (totals.tool_failures or 0) <= (totals.tool_calls or 0)


def event(kind: str, elapsed_s: float = 0.0, **told: Any) -> TraceEvent:
    values = {"source": "agent.log", "offset": 0, "format": "claude-code", "at": "", **told}
    return TraceEvent.model_validate({"kind": kind, "elapsed_s": elapsed_s, **values})


def call(tokens_in: int, tokens_out: int = 0, **told: Any) -> TraceEvent:
    return event("usage", tokens_in=tokens_in, tokens_out=tokens_out, **told)


def whole(tokens_in: int, tokens_out: int = 0, **told: Any) -> TraceEvent:
    return call(tokens_in, tokens_out, is_total=True, **told)


START, A, B = event("session", session="s"), event("session", session="a"), event("session", session="b")
SECOND = {"attempt": 2, "session": "b"}
GEMINI = event("session", format="gemini-cli", session="g")


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([call(100, 10), call(200, 20)], (300, 30)),
        # A call that is told again counts once, as the most that was told.
        ([call(100, 1, call_id="m"), call(100, 1, call_id="m"), call(100, 9, call_id="m"), call(5, 5)], (105, 14)),
        # A total takes the place of its calls: hidden calls of subagents are in it. Calls after it come on top.
        ([call(100, 1), call(200, 2), whole(350, 80)], (350, 80)),
        ([call(100, 1), whole(150, 50), call(200, 2)], (350, 52)),
        # A resumed session goes on: 400 in all; or begins anew: 250 can't hold 150 and the call of 200.
        ([START, whole(150, 50), START, call(200, 2), whole(400, 90)], (400, 90)),
        ([START, whole(150, 50), START, call(200, 2), whole(250, 40)], (400, 90)),
        # Two turns of one process, each told for itself; totals alone that fall.
        ([call(100), whole(100, 10), call(120), whole(120, 12)], (220, 22)),
        ([whole(100, 10), whole(300, 30), whole(50, 5), whole(60, 6)], (360, 36)),
        # Nothing but the format tells that the second process's larger total does not go on.
        ([GEMINI, whole(100, format="gemini-cli"), GEMINI, whole(300, format="gemini-cli")], (400, 0)),
        # Zeros of a crash are no total.
        ([call(100, 1), whole(0, 0)], (100, 1)),
        ([whole(100, 9), call(50, 1), whole(0, 0)], (150, 10)),
        # Sessions by name, by the one that began last, and without names.
        ([A, whole(100, session="a"), B, whole(30, session="b"), whole(120, session="a")], (150, 0)),
        ([A, whole(100), B, whole(30), A, whole(120)], (150, 0)),
        ([event("session"), whole(100), event("session"), whole(30)], (130, 0)),
        # The first attempt left calls and no total; the second, a new session, told both.
        (
            [A, call(100, 5, session="a"), event("session", **SECOND), call(40, 1, **SECOND), whole(45, 9, **SECOND)],
            (145, 14),
        ),
    ],
)
def test_calls_and_totals(events: list[TraceEvent], tokens: tuple[int, int]) -> None:
    totals = add_up(events)
    assert (totals.tokens_in, totals.tokens_out) == tokens


def test_costs_that_differ_by_rounding_go_on_and_zero_is_a_price_that_is_not_known() -> None:
    costs = [0.1, 0.2, 0.3, 0.7, 1e-6]
    events = [event("usage", cost_usd=cost) for cost in costs]
    events.append(event("usage", cost_usd=sum(sorted(costs)) * (1 - 1e-12), calls=5, is_total=True))
    totals = add_up(events)
    assert totals.cost_usd == pytest.approx(1.300001) and totals.driver_calls == 5
    assert add_up([event("usage", tokens_in=5, cost_usd=0.0)]).cost_usd is None


def test_tools_are_counted_by_call() -> None:
    """Called twice and answered once, answered without a call, called and answered without an id, never answered."""
    start = event("session", format="codex", session="t")
    item = [event(kind, format="codex", call_id="item_0", ok=False) for kind in ("tool_call", "tool_result")]
    assert add_up([start, *item, start, *item]).tool_failures == 2, "codex counts items anew in each process"
    events = [
        event("tool_call", 1.0, call_id="a"),
        event("tool_call", 2.0, call_id="a"),
        event("tool_result", 3.0, call_id="a", ok=True),
        event("tool_result", 4.0, call_id="b", ok=False),
        event("tool_call", 5.0),
        event("tool_result", 7.0, ok=False),
        event("tool_call", 8.0, call_id="c"),
    ]
    totals = add_up(events, ended_s=10.0)
    assert (totals.tool_calls, totals.tool_failures) == (4, 2)
    assert totals.driver_spans == ((4.0, 5.0), (7.0, 8.0))


def test_parallel_tools_and_sessions() -> None:
    """Tools run from 10 to 30 and from 20 to 40; another session's driver works from 15 to 50."""
    mine: dict[str, Any] = {"session": "mine"}
    other: dict[str, Any] = {"session": "other"}
    events = [
        event("session", 5.0, **mine),
        event("tool_call", 10.0, call_id="a", **mine),
        event("session", 15.0, **other),
        event("tool_call", 20.0, call_id="b", **mine),
        event("tool_result", 30.0, call_id="a", **mine),
        event("tool_result", 40.0, call_id="b", **mine),
        event("message", 50.0, **other),
        event("message", 60.0, **mine),
        event("end", 60.0, **mine),
        event("message", 90.0, **mine),
    ]
    # Between `a` at 10 and `b` at 20 a tool was open: no driver there. 90 follows an end: nobody waited.
    assert add_up(events).driver_spans == ((5.0, 10.0), (15.0, 60.0))


def test_what_could_not_be_written_is_written_later(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (SAMPLES / "codex.log").read_bytes().splitlines(keepends=True)
    recorder = run.recorder()

    def full(*records: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(recorder._lines, "add", full)
        for at, part in ((1.0, lines[:9]), (2.0, lines[9:12])):
            run.print(b"".join(part))
            with pytest.raises(OSError, match="No space"):
                recorder.look(moment(at))
    run.print(b"".join(lines[12:]))
    recorder.look(moment(3.0))
    recorder.close(moment(4.0))
    assert run.figures() == expected("codex.log")


def test_two_sessions_in_one_document_and_a_copy_of_it(run: Run) -> None:
    path = run.put("mini.traj.json")
    recorder = run.recorder()
    run.sweep.look(moment(1.0))
    recorder.look(moment(1.0))
    run.put("mini.traj.json", "copy.traj.json")
    path.write_text(path.read_text().replace("chatcmpl", "other").replace("toolu", "tool2"))
    recorder.close(moment(2.0))
    totals = run.totals()
    assert (totals.tokens_in, totals.driver_calls, totals.tool_calls) == (9800, 8, 8)
    assert totals.cost_usd == pytest.approx(0.12)
