"""What the doctor examines in tests: programs put first in PATH, a folder that plays /proc, a profile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.doctor.finding import Finding
from autorl_hpc.records.cluster import ClusterProfile

Fake = Callable[..., Path]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts a program of the test's own first in PATH; with `alone`, nothing but such programs and /bin/sh is found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(name: str = "", lines: str = "", *, alone: bool = False) -> Path:
        if alone:
            monkeypatch.setenv("PATH", str(folder))
        if name:
            (folder / name).write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{lines}\n")
            (folder / name).chmod(0o755)
        return folder

    return put


def profile(**fields: Any) -> ClusterProfile:
    return ClusterProfile.model_validate({"name": "mine", **fields})


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def state(finding: Finding) -> str:
    return str(finding.state)


def proc(tmp_path: Path, *lines: str) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "self" / "mountinfo").write_text("".join(f"{line}\n" for line in lines))
    return folder


ROOT = "1 0 8:1 / / rw,relatime - ext4 /dev/sda1 rw"
