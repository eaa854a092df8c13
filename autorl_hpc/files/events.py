"""logs/events.jsonl: what happened in a run, for people and for the report. No score is ever read from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from autorl_hpc.files.ledger import now_text


def append_event(path: Path, kind: str, **fields: Any) -> None:
    """Appends one line. Losing one is no harm, so a failure is silent."""
    line = json.dumps({"at": now_text(), "event": kind, **fields}, ensure_ascii=False, default=str) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, line.encode("utf-8", "backslashreplace"))
        finally:
            os.close(fd)
    except OSError:
        pass
