"""What it costs the recorder to read an agent's own trace: Claude Code's stream, made up, of a megabyte."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STREAM_BYTES = 1_000_000
PASSES = 15
"""The lowest counts: other work on the machine makes times longer and never shorter."""


def measure() -> Iterator[tuple[str, str]]:
    """CPU time a megabyte."""
    data = stream(STREAM_BYTES)
    lowest = min(_reading(data) for _ in range(PASSES))
    lines = data.count(b"\n")
    yield (
        f"an agent's trace, {len(data) / 1e6:.2f} MB in {lines} lines",
        f"{1e9 * lowest / len(data):.0f} ms of CPU a MB",
    )


def _reading(data: bytes) -> float:
    from autorl_hpc.files.layout import RunDir
    from autorl_hpc.recorder.traces.follow import Traces
    from autorl_hpc.recorder.usage import Sweep
    from autorl_hpc.recorder.watch import Moment

    with tempfile.TemporaryDirectory() as folder:
        run, workspace = RunDir(Path(folder) / "run"), Path(folder) / "workspace"
        workspace.mkdir()
        run.logs.mkdir(parents=True)
        run.agent_log.write_bytes(data)
        now = Moment(100.0, "2026-01-01T00:00:00+00:00", 1)
        traces = Traces(run, Sweep(workspace), look_s=60.0)  # one look reads it all
        begun = time.process_time()
        traces.look(now)
        taken = time.process_time() - begun
        traces.close(now)
        return taken


def stream(size: int) -> bytes:
    """A conversation of texts, thoughts, commands, edits and their results, as `claude -p --output-format stream-json` prints it."""
    chance = random.Random(3)
    words = Path(__file__).read_text() * 2
    session = "6f1c0b52-3e55-4a0e-9a53-6c1d0c0c7f11"
    lines = [_line({"type": "system", "subtype": "init", "session_id": session, "model": "claude", "tools": ["Bash"]})]
    number = written = 0
    while written < size:
        number += 1
        begin = chance.randrange(len(words) // 2)
        said, result = words[begin:][: chance.randrange(100, 900)], words[begin:][: chance.randrange(50, 2500)]
        line = {"parent_tool_use_id": None, "session_id": session, "uuid": f"{number:032d}"}
        message = {"role": "assistant", "content": [_block(number, said)], "usage": _usage(number), "model": "claude"}
        made = [_line({"type": "assistant", "message": {"id": f"msg_{number}", **message}, **line})]
        if number % 4 > 1:
            failed = number % 40 == 2
            block = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": result, "is_error": failed}
            made.append(_line({"type": "user", "message": {"role": "user", "content": [block]}, **line}))
        lines += made
        written += sum(map(len, made))
    return b"".join(lines)


def _block(number: int, said: str) -> dict[str, Any]:
    call = {"type": "tool_use", "id": f"toolu_{number}"}
    kinds: tuple[dict[str, Any], ...] = (
        {"type": "text", "text": said},
        {"type": "thinking", "thinking": said, "signature": "Eu" + "A" * 300},
        {**call, "name": "Bash", "input": {"command": f"cd code && python train.py 2>&1 | tail -5\n{said}"}},
        {
            **call,
            "name": "Edit",
            "input": {"file_path": "code/train.py", "old_string": said, "new_string": f"{said}\n"},
        },
    )
    return kinds[number % len(kinds)]


def _usage(number: int) -> dict[str, int]:
    cached = 9000 + 100 * number
    return {
        "input_tokens": 4,
        "cache_creation_input_tokens": 1000,
        "cache_read_input_tokens": cached,
        "output_tokens": 300,
    }


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
