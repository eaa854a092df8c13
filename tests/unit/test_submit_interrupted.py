"""A ctrl-C while jobs are being submitted, and just after."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from plans import experiment as record_of
from plans import profile

from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.launch import sbatch


class Submitting:
    """Stands for the process that submits."""

    returncode = 0
    signals: list[int]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.signals = []
        self.asked = 0

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.asked += 1
        if self.asked == 1:
            raise KeyboardInterrupt
        return "", ""

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        assert number == signal.SIGINT


@pytest.mark.parametrize(("returncode", "said"), [(0, "go on"), (130, None)])
def test_who_interrupts_is_told_what_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returncode: int, said: str | None
) -> None:
    monkeypatch.setattr(sbatch.subprocess, "Popen", Submitting)
    monkeypatch.setattr(Submitting, "returncode", returncode)
    experiment = ExperimentDir(tmp_path)
    for folder in experiment.folders():
        folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        sbatch.submit(experiment, record_of(1, profile()), lines.append)
    assert "taking back" in lines[0]
    assert [line for line in lines[1:] if "go on" in line and "cancel" in line] == lines[1:]
    assert bool(lines[1:]) is bool(said)
