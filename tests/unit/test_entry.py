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


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ValueError("no one expected this"), 4, ("this is a defect", "no one expected this", "in fails")),
        (OSError(28, os.strerror(28), "there"), 3, ("writing failed: No space left on device", "there")),
    ],
)
def test_a_defect_is_told_from_a_full_disk(
    error: Exception, code: int, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise error

    assert guarded(fails) == code
    said = capsys.readouterr().err
    assert all(word in said for word in words) and ("defect" in said) == (code == 4)
