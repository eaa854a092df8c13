"""The last submission: what lies in output/ and was never submitted is better submitted than lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SLACK_S = 2.0
ACCEPTED_WITHIN_S = 45.0
WEIGHTS = (("config.json", "*.safetensors"), ("adapter_config.json", "adapter_model.safetensors"))
MAX_DEPTH = 3


def answers(workspace: Path) -> list[dict[str, Any]]:
    """All answers to submissions."""
    found = []
    for path in sorted((workspace / "results").glob("*.json")):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def any_accepted(workspace: Path) -> bool:
    """Whether a checkpoint was accepted."""
    return any(answer.get("status") in ("accepted", "scored", "failed") for answer in answers(workspace))


def unsubmitted(workspace: Path) -> Path | None:
    """The newest checkpoint under output/ that is newer than its last submission; None: there is none."""
    submitted = _submitted_at(workspace)
    newest: tuple[float, Path] | None = None
    for folder in _folders(workspace / "output", MAX_DEPTH):
        for config, weights in WEIGHTS:
            files = [*folder.glob(weights)]
            if not files or not (folder / config).is_file():
                continue
            try:
                written = max(path.stat().st_mtime for path in files)
            except OSError:
                continue
            before = submitted.get(str(folder.relative_to(workspace)))
            if (before is None or written > before + SLACK_S) and (newest is None or written > newest[0]):
                newest = (written, folder)
    return newest[1] if newest else None


def submit_last(workspace: Path, wait_s: float = ACCEPTED_WITHIN_S) -> str | None:
    """Submits it and waits until it is accepted or refused; what came of it, None where there is nothing to submit."""
    folder = unsubmitted(workspace)
    if folder is None or any(answer.get("submissions_left") == 0 for answer in answers(workspace)):
        return None
    name = str(folder.relative_to(workspace))
    argv = [sys.executable, str(workspace / "submit"), name, "--timeout", f"{wait_s:g}"]
    try:
        done = subprocess.run(
            [*argv, "--note", "last submission, by mini: newest checkpoint that was not submitted"],
            cwd=workspace,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=wait_s + ACCEPTED_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{name}: {error}"
    try:
        answer = json.loads(done.stdout)
        return f"{name}: {answer.get('status')}" + (f": {answer['error']}" if answer.get("error") else "")
    except (ValueError, AttributeError):
        return f"{name}: {(done.stdout + done.stderr).strip()[-300:]}"


def _submitted_at(workspace: Path) -> dict[str, float]:
    """When each folder was last submitted, in seconds since 1970: by the budget's clock, since an answer's own time is renewed."""
    try:
        elapsed_s = float(json.loads((workspace / "time.json").read_text(encoding="utf-8"))["elapsed_s"])
    except (OSError, ValueError, KeyError, TypeError):
        elapsed_s = float("inf")  # then every submission counts as just made
    found: dict[str, float] = {}
    for answer in answers(workspace):
        name, at = answer.get("model_path"), answer.get("elapsed_seconds")
        if isinstance(name, str):
            ago_s = max(0.0, elapsed_s - at) if isinstance(at, (int, float)) and elapsed_s != float("inf") else 0.0
            path = name.strip("/").removeprefix("./")
            found[path] = max(found.get(path, 0.0), time.time() - ago_s)
    return found


def _folders(top: Path, depth: int) -> list[Path]:
    if depth < 0 or top.is_symlink() or not top.is_dir():
        return []
    try:
        below = sorted(path for path in top.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return [top]
    return [top, *(folder for path in below for folder in _folders(path, depth - 1))]
