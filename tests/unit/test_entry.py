"""Every way of failing becomes an exit code and a message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from autorl_hpc.entry import guarded

IN_A_LIBRARY = """
import os, signal, sys
from autorl_hpc.entry import guarded

def loads():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
    except KeyboardInterrupt:
        raise ValueError("Error building a serializer: KeyboardInterrupt")

sys.exit(guarded(loads))
"""


def test_a_ctrl_c_that_a_library_turns_into_an_error_of_its_own_is_a_ctrl_c() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_LIBRARY],
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.returncode == 130, done
    assert done.stderr.startswith("autorl-hpc: interrupted"), done
    assert "Traceback" not in done.stderr


def test_an_error_without_a_ctrl_c_is_a_defect(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise ValueError("no one expected this")

    assert guarded(fails) == 4
    said = capsys.readouterr().err
    assert "this is a defect" in said and "no one expected this" in said and "in fails" in said


def test_a_full_disk_is_no_defect(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise OSError(28, os.strerror(28), "there")

    assert guarded(fails) == 3
    said = capsys.readouterr().err
    assert "defect" not in said and "there" in said
