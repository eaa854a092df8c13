"""Each format of a trace, from one whole session: the totals, added up by hand; how long things took, by which clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tracedrun
from tracedrun import DOCUMENTS, EXPECTED, NOON, SAMPLES, Run, figures, moment

from autorl_hpc.recorder.traces.totals import add_up

run = tracedrun.run


@pytest.mark.parametrize("sample", EXPECTED)
def test_a_whole_session_adds_up(run: Run, sample: str) -> None:
    if sample in DOCUMENTS:
        run.put(sample)
    else:
        run.print((SAMPLES / sample).read_bytes())
    assert figures(run.once()) == EXPECTED[sample]


@pytest.mark.parametrize(
    ("sample", "name"),
    [
        ("claude_code.log", "claude-code"),
        ("codex.log", "codex"),
        ("gemini_cli.log", "gemini-cli"),
        ("gemini_cli_document.log", "gemini-cli"),
        ("opencode.log", "opencode"),
        ("openhands.log", "openhands"),
        ("mini.traj.json", "mini"),
        ("mini.log", "mini"),
    ],
)
def test_the_agents_definition_names_the_format(run: Run, tmp_path: Path, sample: str, name: str) -> None:
    other = Run(tmp_path / "other")
    for each in (run, other):
        each.put(sample) if sample in DOCUMENTS else each.print((SAMPLES / sample).read_bytes())
    assert figures(run.once(name)) == EXPECTED[sample]
    assert {event.format for event in run.events()} == {name}
    assert other.once("codex" if name != "codex" else "opencode").sessions == (), "another format is not looked for"


def test_an_unknown_format_is_refused(run: Run) -> None:
    with pytest.raises(ValueError, match="known are claude-code"):
        run.recorder("claude")


def test_all_formats_in_one_log(run: Run) -> None:
    """An agent may call others: each adds its own."""
    samples = ["claude_code.log", "codex.log", "gemini_cli.log", "opencode.log", "mini.log"]
    for sample in samples:
        run.print((SAMPLES / sample).read_bytes())
    totals = run.once()
    for key in ("in", "out", "cached", "tools", "failures", "errors"):
        assert figures(totals)[key] == sum(EXPECTED[sample][key] for sample in samples), key


def test_output_around_the_lines(run: Run) -> None:
    """Prefixes, colours, a carriage return, and lines that only look like a trace."""
    for line in (SAMPLES / "claude_code.log").read_bytes().splitlines():
        run.print(b"{'loss': 0.5}\r\n[12:00:01] \x1b[32mINFO\x1b[0m {agent} " + line + b"  \r\n" + b'{"type": "x"\n')
    assert figures(run.once()) == EXPECTED["claude_code.log"]


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
    assert run.once().tool_failures == 1
    for event in run.events():
        assert all(
            part is None or part.isprintable() for part in (event.session, event.call_id, event.command, event.text)
        )


def test_times_of_tools_and_driver(run: Run) -> None:
    """Looks at 10, 20, ... s. The driver works from 10 to 20, two tools from 20 to 40, the driver from 40 to 50."""
    lines = (SAMPLES / "codex.log").read_bytes().splitlines(keepends=True)
    recorder = run.recorder()
    for at, part in (
        (10.0, lines[1:3]),
        (20.0, lines[3:6]),
        (30.0, lines[6:7]),
        (40.0, lines[7:8]),
        (50.0, lines[12:14]),
    ):
        run.print(b"".join(part))
        recorder.look(moment(at))
    recorder.close(moment(55.0))
    totals = add_up(run.events())
    assert totals.tool_spans == ((20.0, 40.0),) and totals.tool_s == 20.0
    assert totals.driver_spans == ((10.0, 20.0), (40.0, 50.0)) and totals.driver_s == 20.0
    assert totals.last_driver_s == 50.0
    assert [totals.tokens_at(s) for s in (0.0, 49.9, 50.0, 1e9)] == [0, 0, 24885, 24885]


def test_a_call_without_an_answer_lasts_until_the_end(run: Run) -> None:
    lines = (SAMPLES / "codex.log").read_bytes().splitlines(keepends=True)
    recorder = run.recorder()
    run.print(b"".join(lines[1:6]))
    recorder.look(moment(20.0))
    recorder.close(moment(21.0))
    events = run.events()
    assert add_up(events, ended_s=100.0).tool_spans == ((20.0, 100.0),)
    resumed = events + [event.model_copy(update={"attempt": 2, "elapsed_s": 60.0}) for event in events[:1]]
    assert add_up(resumed, ended_s=100.0).tool_spans == ((20.0, 60.0),), "it ended with its attempt"


def test_durations_that_the_trace_gives(run: Run) -> None:
    """OpenCode tells a call when it is over. The second look is at 10 s of budget, 00:00:04.6 by the clock: 3 s until 9.4,
    and 2.5 s until 9.9, together from 6.4 to 9.9."""
    lines = (SAMPLES / "opencode.log").read_bytes().splitlines(keepends=True)
    recorder = run.recorder()
    run.print(lines[0])
    recorder.look(moment(1.0, "2025-12-31T23:59:55.600+00:00"))
    run.print(b"".join(lines[1:3]))
    recorder.look(moment(10.0, "2026-01-01T00:00:04.600+00:00"))
    recorder.close(moment(10.0, "2026-01-01T00:00:04.600+00:00"))
    (span,) = add_up(run.events()).tool_spans
    assert span == pytest.approx((6.4, 9.9))


def test_stamps_lie_between_two_looks(run: Run) -> None:
    """Looks at 100 s and 110 s of budget, the second at 00:00:07 by the clock: the stamps of 00:00:03 and later count."""
    recorder = run.recorder()
    recorder.look(moment(100.0, "2026-01-01T00:00:00.000+00:00"))
    run.print((SAMPLES / "gemini_cli.log").read_bytes())
    recorder.look(moment(110.0, "2026-01-01T00:00:07.000+00:00"))
    recorder.close(moment(110.0, "2026-01-01T00:00:07.000+00:00"))
    at = {event.call_id or event.kind: event.elapsed_s for event in run.events() if event.kind != "tool_result"}
    assert at["run_shell_command-1"] == pytest.approx(106.0)
    assert at["end"] == 110.0, "a stamp after the look"
    first = next(event for event in run.events() if event.kind == "session")
    assert first.elapsed_s == pytest.approx(103.0)


def test_stamps_of_the_output_count_more(run: Run) -> None:
    lines = (SAMPLES / "codex.log").read_bytes().splitlines(keepends=True)
    run.print(b"".join(lines[:4]))
    edge = run.log.stat().st_size
    run.print(b"".join(lines[4:8]))
    run.run.agent_times.write_text(f"{edge} 12.5 {NOON}\n{run.log.stat().st_size} 17.0 {NOON}\n")
    run.once()
    assert [(e.kind, e.elapsed_s) for e in run.events()][:3] == [
        ("session", 12.5),
        ("message", 12.5),
        ("tool_call", 17.0),
    ]
