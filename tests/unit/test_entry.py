"""Every way of failing becomes an exit code and a message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from autorl_hpc.entry import Interrupts, guarded

IN_A_LIBRARY = """
import os, signal, sys
from autorl_hpc.entry import Interrupts, guarded

def loads():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
    except KeyboardInterrupt:
        raise ValueError("Error building a serializer: KeyboardInterrupt")

interrupts = Interrupts()
interrupts.notice()
sys.exit(guarded(loads, interrupts))
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


IN_A_CALLBACK = """
import os, signal, sys, time, weakref
from autorl_hpc.entry import Interrupts, guarded

class Thing:
    pass

def gone(reference):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass

def loads():
    thing = Thing()
    reference = weakref.ref(thing, gone)
    del thing
    time.sleep(3600)

interrupts = Interrupts()
interrupts.notice()
sys.exit(guarded(loads, interrupts))
"""


def test_a_ctrl_c_that_comes_where_nothing_can_be_raised_is_a_ctrl_c() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_CALLBACK],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.returncode == 130, done
    assert done.stderr.startswith("autorl-hpc: interrupted") and "Traceback" not in done.stderr, done


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_LIBRARY],
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_without_a_ctrl_c_is_a_defect(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise ValueError("no one expected this")

    assert guarded(fails, Interrupts()) == 4
    said = capsys.readouterr().err
    assert "this is a defect" in said and "no one expected this" in said and "in fails" in said


def test_a_full_disk_is_no_defect(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise OSError(28, os.strerror(28), "there")

    assert guarded(fails, Interrupts()) == 3
    said = capsys.readouterr().err
    assert "defect" not in said and "there" in said
