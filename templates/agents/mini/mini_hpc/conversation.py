"""The conversation as it lies on disk, one message a line, and as it is told on standard output.

A line is appended before its command runs, so that whatever ends this process, the next one goes on. The trace is one JSON object
a line, `{"type": "mini", "session": ..., "message": ...}`, with messages in the form of mini-swe-agent's trajectories.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

Message = dict[str, Any]

TOLD_CHARS = 20_000
"""Of one output in the trace."""


class Conversation:
    """Appends to `path`, and prints.

    Attributes:
        session: the same over all starts.
        start: 1 for the first process, then 2, ...
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved: list[Message] = []
        self.session, self.start = uuid.uuid4().hex[:12], 1
        self._file: int | None = None
        self._load()

    def _load(self) -> None:
        """What an earlier process left; a line that it did not finish is cut off."""
        try:
            data = self.path.read_bytes()
        except OSError:
            return
        whole = 0
        for line in data.splitlines(keepends=True):
            try:
                value = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or not isinstance(value, dict):
                break
            whole += len(line)
            if "role" in value:
                self.saved.append(value)
            else:
                self.session = str(value.get("session") or self.session)
                self.start = int(value.get("start") or 0) + 1
        if whole < len(data):
            os.truncate(self.path, whole)

    def begin(self, model: str) -> None:
        """Notes that a process begins."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._append({"session": self.session, "start": self.start})
        self._print(start=self.start, model=model)

    def add(self, message: Message) -> None:
        """Keeps a message and tells it."""
        self._append(message)
        self._print(message=_told(message))

    def fail(self, line: str) -> None:
        """Tells of a failure; it is not part of the conversation."""
        self._print(error=line)

    def note(self, line: str) -> None:
        """Tells of something else; neither a failure nor a part of the conversation."""
        self._print(note=line)

    def _append(self, value: dict[str, Any]) -> None:
        assert self._file is not None, "begin() comes first"
        data = memoryview(json.dumps(value).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:  # a full disk: the work can go on, only an interruption would lose this
            self._print(error=f"the conversation could not be saved: {error}")

    def _print(self, **fields: Any) -> None:
        print(json.dumps({"type": "mini", "session": self.session, "at": time.time(), **fields}), flush=True)


def _told(message: Message) -> Message:
    """Without what stands in it twice."""
    extra = {key: value for key, value in (message.get("extra") or {}).items() if key != "raw_output"}
    content = message.get("content")
    if isinstance(content, str) and len(content) > TOLD_CHARS:
        content = f"{content[:TOLD_CHARS]} [... {len(content) - TOLD_CHARS} characters left out]"
    return {**message, "content": content, "extra": extra}
