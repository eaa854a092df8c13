"""A worker process of an engine, whatever it does: who waits for it is told, once, and in time."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from helpers import PATIENCE_S, alive

from autorl_hpc.grading.engines.framing import Frame
from autorl_hpc.grading.engines.worker_process import Replica
from autorl_hpc.rollouts.engine import EngineFailed

LARGE = {"op": "start", "names": ["model.layers.0.mlp.experts.0.gate_proj.weight"] * 20_000}
"""More than a socket takes before the other end reads."""

SPEAKS = "import os, sys, time\nos.write(int(sys.argv[1]), {said!r})\ntime.sleep(600)"


def speaks(said: bytes) -> list[str]:
    return [sys.executable, "-S", "-c", SPEAKS.format(said=said)]


def misheard(frame: Frame) -> None:
    raise OverflowError("number too small to fit")


@pytest.mark.parametrize(
    ("command", "told", "soon"),
    [
        (["/nowhere/python"], "could not be started", None),
        (["/bin/sh", "-c", "exit 3"], "ended with 3", None),
        (["/bin/sh", "-c", "sleep 600"], "no sign of life", "start_limit_s"),
        (speaks(b"\x09\x00\x00\x00"), "in the middle of a frame", "silence_limit_s"),
        (speaks(b"\x09\x00\x00\x00\x00\x00\x00\x00" + b'{"a": []}'), "OverflowError", None),
    ],
    ids=["nothing to start", "ends at once", "hangs before it reads", "hangs while it speaks", "handler fails"],
)
@pytest.mark.slow
def test_however_a_worker_ends_it_is_told(tmp_path: Path, command: list[str], told: str, soon: str | None) -> None:
    ends: list[EngineFailed] = []
    ended = threading.Event()

    def end(problem: EngineFailed) -> None:
        ends.append(problem)
        ended.set()

    limits = {"start_limit_s": PATIENCE_S, "silence_limit_s": PATIENCE_S}
    if soon is not None:
        limits[soon] = 3.0
    replica = Replica(command, {}, tmp_path / "log", LARGE, misheard, end, **limits)
    assert ended.wait(PATIENCE_S), "nobody was told"
    with pytest.raises(EngineFailed, match=told):
        for _ in range(3):
            replica.send({"op": "prefetch"})
    replica.close()
    assert [told in str(end) for end in ends] == [True]
    assert replica.pid is None or not alive(replica.pid)
