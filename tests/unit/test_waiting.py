"""Waiting in tests: a wait that can't succeed any more fails at once and shows the log. It catches red suites that take hours."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm
from helpers import PATIENCE_S, Cluster, wait_for


def test_it_fails_at_once_when_the_process_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    began = time.monotonic()
    with pytest.raises(AssertionError, match="has ended with 7"):
        wait_for(lambda: False, "nothing", process=process)
    assert time.monotonic() - began < PATIENCE_S


def test_a_defect_of_any_process_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "open", [])
    for part in ("store", "vault"):
        (tmp_path / "staged" / part).mkdir(parents=True)
    cluster = Cluster(tmp_path / "staged", tmp_path)
    cluster.begin("broken", "-c", "print('the reason'); raise SystemExit(4)")
    with pytest.raises(AssertionError, match=r"(?s)by a defect.*the reason"):
        wait_for(lambda: False, "nothing")


@pytest.mark.slow
def test_a_warm_process_is_as_a_cold_one_and_outlives_its_server(tmp_path: Path) -> None:
    """Its status, a kill of it, and a kill of the server, as agents of tests do it."""

    def begin(*arguments: str) -> warm.WarmProcess:
        with open(tmp_path / "log", "wb") as log:
            return warm.start(["-m", *arguments], {"A": "b"}, tmp_path, log, log)

    assert begin("autorl_hpc", "--version").wait(PATIENCE_S) == 0 and b"autorl-hpc" in (tmp_path / "log").read_bytes()
    assert begin("autorl_hpc", "job", "grader", "/nowhere").wait(PATIENCE_S) == 2
    sleeper = begin("timeit", "-n1", "import time; time.sleep(900)")
    assert sleeper.poll() is None
    assert Path(f"/proc/{sleeper.pid}/cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"timeit"]
    assert Path(f"/proc/{sleeper.pid}/environ").read_bytes().rstrip(b"\0") == b"A=b"
    assert warm._SERVER is not None
    warm._SERVER.process.kill()
    warm._SERVER.process.wait()
    assert sleeper.poll() is None
    sleeper.kill()
    assert sleeper.wait(PATIENCE_S) == -9
    assert begin("autorl_hpc", "--version").wait(PATIENCE_S) == 0
