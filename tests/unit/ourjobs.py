"""The names of our jobs, and the clients that are asked for them: scripts that print recorded output."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import Clients

UID = "0123456789ab"
AGENTS, GRADER = f"exp.agents-2.{UID}", f"exp.grader-0.{UID}"


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clients:
    return Clients(tmp_path, monkeypatch)
