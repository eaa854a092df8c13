"""What tests of the agent `mini` share: its modules, and a workspace in which it runs alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S

AGENT = Path(__file__).resolve().parent.parent / "templates" / "agents" / "mini"


def parts() -> None:
    """Makes mini's modules importable; the test skips by name where its library is not installed."""
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed: pip install 'autorl-hpc[mini]'")
    if str(AGENT) not in sys.path:
        sys.path.insert(0, str(AGENT))


class Alone:
    """A workspace without a supervisor; `started` runs mini in it to its end."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "workspace"
        for name in ("code", "output", "results", "submissions", ".home", ".tmp"):
            (self.path / name).mkdir(parents=True)
        self.tell_time(left_s=3600)

    def tell_time(self, **fields: Any) -> None:
        temporary = self.path / ".time"
        temporary.write_text(json.dumps({"elapsed_s": 1.0, **fields}))
        temporary.rename(self.path / "time.json")

    def accept(self, name: str, *, elapsed_s: float = 0.0) -> None:
        """As if a checkpoint had been scored."""
        answer = {"status": "scored", "model_path": name, "score": 0.5, "elapsed_seconds": elapsed_s}
        (self.path / "results" / f"{name.replace('/', '-')}.json").write_text(json.dumps(answer))

    def checkpoint(self, name: str) -> Path:
        folder = self.path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
        return folder

    def tool(self) -> None:
        """The real ./submit; nobody answers it."""
        shutil.copy(AGENT.parents[1] / "workspace" / "submit", self.path / "submit")
        (self.path / "submit").chmod(0o755)

    def manifests(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.path / "submissions").glob("[!.]*.json"))]

    def env(self, url: str, **changes: str) -> dict[str, str]:
        """As the supervisor sets it."""
        return {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.path / ".home"),
            "TMPDIR": str(self.path / ".tmp"),
            "WORKSPACE": str(self.path),
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": "token",
            "AUTORL_DRIVER_MODEL": "scripted",
            "AUTORL_DRIVER_CONTEXT_TOKENS": "16000",
            **changes,
        }

    def start(self, url: str, prompt: str = "Improve the model.", **changes: str) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command, env = ["bash", str(AGENT / "start.sh")], self.env(url, **changes)
        process = subprocess.Popen(command, env=env, cwd=self.path, text=True, start_new_session=True, **pipes)
        assert process.stdin is not None
        process.stdin.write(prompt)
        process.stdin.close()
        process.stdin = None
        return process

    def run(self, url: str, prompt: str = "Improve the model.", **changes: str) -> tuple[int, list[dict[str, Any]]]:
        """Exit code and trace."""
        process = self.start(url, prompt, **changes)
        out, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, trace(out)


def trace(out: str) -> list[dict[str, Any]]:
    """The lines that are objects; others are kept as a text."""
    found = []
    for line in out.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            found.append({"other": line})
    return found


def contents(lines: list[dict[str, Any]], role: str) -> list[str]:
    """What messages of one role hold."""
    return [each["message"]["content"] for each in lines if each.get("message", {}).get("role") == role]


def errors(lines: list[dict[str, Any]]) -> list[str]:
    """Failures that were told."""
    return [each["error"] for each in lines if "error" in each]
