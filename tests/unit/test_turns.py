"""Agents' traces as turns with their content: every format gives the same form; hostile traces; the pages that show them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from recordmaker import no_fsync, tree  # noqa: F401
from test_report_imported import GOOD, workspace
from test_traces import DOCUMENTS, SAMPLES, Run
from treemaker import Tree, TreeRun, outcomes

from autorl_hpc.recorder.traces.turns import HEAD_CHARS, TAIL_CHARS, TraceTurn, read_turns
from autorl_hpc.records.entries import Contaminated, Contamination
from autorl_hpc.records.recorded import TrajectoryMessage
from autorl_hpc.report import pages, report
from autorl_hpc.report.run_summary import digest
from autorl_hpc.report.trace_page import trace_data, turns_of
from autorl_hpc.states import EntryKind, Split

ASSISTANT, USER = ("assistant", "I look."), ("user", "Improve it.")
CALL = ("Bash", "ls data", "train.jsonl", 0, True)


def lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def claude(kind: str, *content: Any, **more: Any) -> dict[str, Any]:
    message = {"id": "m1", "model": "model-x", "usage": {"input_tokens": 90, "output_tokens": 5}, "content": content}
    return {
        "type": kind,
        "session_id": "s",
        "message": message if kind == "assistant" else {"content": content},
        **more,
    }


def opencode(kind: str, part: Any) -> dict[str, Any]:
    return {"type": kind, "timestamp": 1767225600000, "sessionID": "s", "part": part}


def gemini(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "timestamp": "2026-01-01T00:00:00Z", **more}


COMMAND = {"type": "command_execution", "id": "i1", "command": "ls data"}
TOKENS = {"input": 90, "output": 5, "reasoning": 0, "cache": {"read": 0, "write": 0}}
STATE = {"status": "completed", "input": {"command": "ls data"}, "output": "train.jsonl", "metadata": {"exit": 0}}
ANSWER = {"id": "c1", "model": "model-x", "usage": {"prompt_tokens": 90, "completion_tokens": 5}}
MINI = [
    {"role": "user", "content": "Improve it."},
    {
        "role": "assistant",
        "content": "I look.",
        "extra": {"actions": [{"command": "ls data", "tool_call_id": "t"}], "response": ANSWER},
    },
    {"role": "tool", "tool_call_id": "t", "content": "train.jsonl", "extra": {"returncode": 0}},
]
EVENT = {"kind": "ActionEvent", "tool_name": "Bash", "tool_call_id": "t", "action": {"command": "ls data"}}
OBSERVED = {"content": [{"type": "text", "text": "train.jsonl"}], "exit_code": 0}
SAME: dict[str, bytes] = {
    "claude-code": lines(
        claude("user", {"type": "text", "text": "Improve it."}),
        claude("assistant", {"type": "text", "text": "I look."}),
        claude("assistant", {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "ls data"}}),
        claude(
            "user", {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "train.jsonl"}]}
        ),
    ),
    "codex": lines(
        {"type": "thread.started", "thread_id": "s"},
        {"type": "item.completed", "item": {"type": "agent_message", "id": "i0", "text": "I look."}},
        {"type": "item.started", "item": COMMAND},
        {"type": "item.completed", "item": {**COMMAND, "aggregated_output": "train.jsonl", "exit_code": 0}},
        {"type": "turn.completed", "usage": {"input_tokens": 90, "output_tokens": 5}},
    ),
    "codex before 0.44": lines(
        {"id": "0", "msg": {"type": "agent_message", "message": "I look."}},
        {"id": "0", "msg": {"type": "exec_command_begin", "call_id": "c", "command": ["ls", "data"]}},
        {"id": "0", "msg": {"type": "exec_command_end", "call_id": "c", "stdout": "train.jsonl", "exit_code": 0}},
        {"id": "0", "msg": {"type": "token_count", "input_tokens": 90, "output_tokens": 5}},
        {"id": "0", "msg": {"type": "task_complete"}},
    ),
    "gemini-cli": lines(
        gemini("init", session_id="s", model="model-x"),
        gemini("message", role="user", content="Improve it."),
        gemini("message", role="assistant", content="I ", delta=True),
        gemini("message", role="assistant", content="look.", delta=True),
        gemini("tool_use", tool_name="Bash", tool_id="t", parameters={"command": "ls data"}),
        gemini("tool_result", tool_id="t", status="success", output="train.jsonl"),
        gemini("result", status="success", stats={"input_tokens": 90, "output_tokens": 5}),
    ),
    "opencode": lines(
        opencode("step_start", {}),
        opencode("text", {"text": "I look."}),
        opencode("tool_use", {"callID": "t", "tool": "Bash", "state": STATE}),
        opencode("step_finish", {"id": "p", "tokens": TOKENS}),
    ),
    "openhands": lines(
        {"kind": "MessageEvent", "source": "user", "llm_message": {"content": [{"text": "Improve it."}]}},
        {"kind": "MessageEvent", "source": "agent", "llm_message": {"content": [{"text": "I look."}]}},
        EVENT,
        {"kind": "ObservationEvent", "tool_name": "Bash", "tool_call_id": "t", "observation": OBSERVED},
    ),
    "mini": lines(*({"type": "mini", "session": "s", "message": message} for message in MINI)),
}
LACKS = {
    "codex": ("user", "Bash", "model"),  # names its tools by kind, and no prompt
    "gemini-cli": ("exit",),
    "opencode": ("user", "model"),
    "openhands": ("model", "tokens"),
    "mini": ("Bash",),
}
"""What a format doesn't tell; all else is one form."""


def log_of(folder: Path, data: bytes) -> list[TraceTurn]:
    (folder / "agent.log").write_bytes(data)
    return read_turns(folder / "agent.log", folder / "agent.times")


@pytest.mark.parametrize("form", SAME)
def test_every_format_gives_the_same_form(tmp_path: Path, form: str) -> None:
    """Faults: a tool's result that is not found again, an answer cut into several turns, figures at another turn."""
    data, form = SAME[form], form.partition(" ")[0]
    lacks = LACKS.get(form, ())
    (turn,) = log_of(tmp_path, data)
    parts = [p for p in turn.parts if p.kind != "end"]
    words = [(p.kind, p.text) for p in parts if p.kind != "tool"]
    assert words == ([ASSISTANT] if "user" in lacks else [USER, ASSISTANT])
    (tool,) = [p for p in parts if p.kind == "tool"]
    name = {"codex": "command_execution", "mini": "bash"}.get(form, "Bash")
    assert (tool.tool, tool.text, tool.output, tool.ok) == (name, "ls data", "train.jsonl", True)
    assert tool.exit_code == (None if form in ("gemini-cli", "claude-code") else 0)
    assert turn.number == 1 and turn.format == form and turn.model == (None if "model" in lacks else "model-x")
    assert turn.figures.get("tokens_in") == (None if "tokens" in lacks else 90)


def test_a_trajectory_is_kept_with_its_content_and_without_its_secrets(tmp_path: Path) -> None:
    """It is rewritten in the workspace: what the recorder saw must be in the run's folder."""
    run = Run(tmp_path)
    run.put("mini.traj.json")
    run.once()
    run.once()  # a recorder that starts anew keeps nothing twice
    text = run.run.recorded("trajectories").read_text()
    kept = [TrajectoryMessage.model_validate_json(line) for line in text.splitlines()]
    assert len(kept) == len(json.loads((SAMPLES / "mini.traj.json").read_text())["messages"])
    assert "hf_abcdefghijklmnopqrst" not in text and {one.source for one in kept} == {DOCUMENTS["mini.traj.json"]}
    turns = read_turns(run.log, run.run.agent_times, kept)
    assert [turn.number for turn in turns] == [1, 2, 3, 4]
    assert [p.output for p in turns[0].parts if p.kind == "tool"] == [m["content"] for m in SAMPLE_TOOLS[:2]]
    assert turns[0].elapsed_s == 101.0, "when it was found"


SAMPLE_TOOLS = [m for m in json.loads((SAMPLES / "mini.traj.json").read_text())["messages"] if m["role"] == "tool"]


def test_a_plain_log_and_output_between_turns(tmp_path: Path) -> None:
    noise = b"".join(b"line %d\n" % n for n in range(400_000))
    turns = log_of(tmp_path, noise + SAME["codex"] + b"Traceback (most recent call last):\nboom\n")
    assert sum(turn.number is not None for turn in turns) == 1
    assert turns[0].parts[0].text.startswith("line 0\n") and turns[-1].parts[0].text.endswith("boom\n")
    assert any("not shown: " in turn.parts[0].text for turn in turns) and len(turns) < 140
    assert [turn.offset for turn in turns] == sorted(turn.offset or 0 for turn in turns)


HTML = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--"
HOSTILE = {
    "html": claude(
        "assistant",
        {"type": "text", "text": HTML},
        {"type": "tool_use", "id": "t", "name": HTML, "input": {HTML: HTML}},
    ),
    "escapes": claude("assistant", {"type": "text", "text": "\x1b[31mred\x1b]0;owned\x07 \u202e\ud800\x00\u2028"}),
    "long": claude("assistant", {"type": "text", "text": "x" * 3_000_000 + "end"}),
    "deep": claude(
        "assistant", {"type": "tool_use", "id": "t", "name": "n", "input": json.loads("[" * 900 + "]" * 900)}
    ),
    "kinds": claude(
        "assistant", {"type": "text", "text": 7}, {"type": "tool_use", "id": [], "name": {}, "input": None}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_traces(tmp_path: Path, tree: Tree, name: str) -> None:  # noqa: F811
    run = run_with(
        tree, b"\xff\xfe\x00" + lines(HOSTILE[name]) + b'{"type":"assistant","session_id":' + b"[" * 100_000 + b"\n"
    )
    found = digest(run.dir)
    folder = pages.write_run(found, run.dir, run.dir.path, pages.Writing(one_file=name == "html"))
    texts = [part.text for turn in turns_of(found, run.dir) for part in turn.parts]
    assert all(len(text) < HEAD_CHARS + TAIL_CHARS + 100 for text in texts)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", "".join(texts))
    whole = "".join(path.read_text() for path in [folder / "trace.html", *folder.glob("trace/*")])
    assert "<script>alert" not in whole and "<img" not in whole
    assert whole.count("<script") == whole.count("</script>") == (3 if name == "html" else 1)


def run_with(tree: Tree, log: bytes) -> TreeRun:  # noqa: F811
    """A live run whose log was written evenly over 600 s, with submissions at 100 s and 300 s."""
    run = tree.run(agent="codex").start()
    run.dir.logs.mkdir(exist_ok=True)
    run.dir.agent_log.write_bytes(log)
    run.dir.agent_times.write_text("".join(f"{len(log) * n // 600} {n} t\n" for n in range(1, 601)))
    run.submit(100.0, outcomes(40, range(12)))
    run.submit(300.0, outcomes(40, range(20)))
    return run


def item(n: int, command: str, code: int = 0) -> bytes:
    told = {"type": "command_execution", "id": f"i{n}", "command": command}
    said = {"type": "item.completed", "item": {"type": "agent_message", "id": f"m{n}", "text": f"turn {n}"}}
    done = {**told, "aggregated_output": f"out {n}", "exit_code": code, "status": "failed" if code else "completed"}
    return lines(said, {"type": "item.started", "item": told}, {"type": "item.completed", "item": done})


SIXTY = b"".join(
    item(n, "./submit output/v1" if n in (9, 15) else f"python train.py {n}", int(n == 40)) for n in range(60)
)


def test_from_a_submission_to_its_turn_and_from_a_failure_to_its_line(tree: Tree) -> None:  # noqa: F811
    run = run_with(tree, SIXTY)
    made = trace_data(digest(run.dir), run.dir)
    assert made is not None
    link = made[0]
    assert (link.turns, link.tools, link.failures) == (60, 60, 1)
    assert link.submissions == {1: "trace.html#e9", 2: "trace.html#e30"}, (
        "a call that submits just before; the time's turn"
    )
    assert link.at(f"agent.log, byte {SIXTY.index(b'train.py 40') + 5}") == "trace.html#e40"
    assert link.at("process at 301 s") == "trace.html#e30" and link.at("ledger entry 3") is None
    page = pages.write_run(digest(run.dir), run.dir, run.dir.path) / "run.html"
    assert 'href="trace.html#e9"' in page.read_text()


def test_held_out_items_hide_every_word_and_a_shorter_trace_leaves_none(tree: Tree) -> None:  # noqa: F811
    run = run_with(tree, SIXTY * 4)
    folder = pages.write_run(digest(run.dir), run.dir, run.dir.path)
    assert len(list((folder / "trace").iterdir())) == 4
    found = Contaminated(file="data/x.jsonl", split=Split.REPORT, items=1, first_items=("1",), how="exact")
    look = Contamination(found=(found,), items={Split.REPORT: 1}, of={Split.REPORT: 1}, complete=True)
    run.write(EntryKind.CONTAMINATION, look)
    run.dir.agent_log.write_bytes(SIXTY)
    pages.write_run(digest(run.dir), run.dir, run.dir.path)
    text = "".join(path.read_text() for path in (folder / "trace").iterdir())
    assert "train.py" not in text and "out 5" not in text and "exit_code" in text
    assert len(list((folder / "trace").iterdir())) == 2


def test_a_run_of_autorl_bench_has_its_trace_with_times_of_its_own(tmp_path: Path) -> None:
    """Its agents print to agent.log, among headings of the wrapper; no recorder stamped it."""
    folder = workspace(tmp_path / "bench", GOOD)
    late = SAME["opencode"].replace(b"1767225600000", b"1767229200000").replace(b'"s"', b'"s2"')
    (folder / "agent.log").write_bytes(b"=== OpenCode ===\nTask: gsm8k\n" + SAME["opencode"] + late + b"exit_code: 0\n")
    index = report.refresh([tmp_path / "bench"], tmp_path / "out", report.Options()).index
    (page,) = index.parent.glob("runs/*/trace/p0.js")
    turns = json.loads(page.read_text().removeprefix('trace("p0", ').removesuffix(");\n"))
    assert [turn.get("n") for turn in turns] == [None, 1, 2, None]
    assert [turn.get("at") for turn in turns[1:3]] == ["0 s", "60 min"]
