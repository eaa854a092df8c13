"""Memory of a process whose child has not exec'd yet: subprocess forks without a copy, and the kernel shows everything twice."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest
from helpers import wait_for

from autorl_hpc.files.processes import KCMP, KCMP_VM, memory_bytes, of_their_own

MIB = 2**20
LARGE = 100 * MIB

STARTS = """
import ctypes, os, sys
x = bytearray({large})
libc = ctypes.CDLL(None)
flags = {{"vfork": 0x4100, "fork": 0}}[sys.argv[1]]  # CLONE_VM | CLONE_VFORK
if sys.argv[1] == "fork":
    if os.fork() == 0:
        libc.pause()
    libc.pause()
stack = ctypes.create_string_buffer(1 << 16)
top = ctypes.addressof(stack) + (1 << 16) - 64
libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), ctypes.c_void_p(top), flags | 17, None)
"""
"""A large process with a child that shares all of its memory (and can't have exec'd), or a copy of it."""


def _kcmp_works() -> bool:
    number = KCMP.get(platform.machine())
    return number is not None and ctypes.CDLL(None).syscall(number, os.getpid(), os.getpid(), KCMP_VM, 0, 0) == 0


def children(pid: int) -> list[int]:
    return [int(part) for part in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """(a process, its child)."""
    code = STARTS.format(large=LARGE)
    process = subprocess.Popen([sys.executable, "-c", code, request.param], start_new_session=True)
    try:
        (child,) = wait_for(lambda: children(process.pid), "the child")
        yield process.pid, child
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@needs.needs("kernel", _kcmp_works(), "this kernel does not compare processes")
@pytest.mark.parametrize("pair", ["vfork"], indirect=True)
def test_what_a_child_has_of_its_parent_until_it_execs_counts_once(pair: tuple[int, int]) -> None:
    both = set(pair)
    assert of_their_own(both) == {pair[0]} and of_their_own({pair[1]}) == {pair[1]}
    for enough in (0.0, float(1 << 40)):
        assert LARGE <= memory_bytes({pair[0]}, enough) <= LARGE + 60 * MIB
        assert memory_bytes(both, enough) == pytest.approx(memory_bytes({pair[0]}, enough), abs=5 * MIB)


@pytest.mark.parametrize("pair", ["fork"], indirect=True)
def test_a_copy_is_a_process_of_its_own(pair: tuple[int, int]) -> None:
    assert of_their_own(set(pair)) == set(pair)
    assert LARGE <= memory_bytes(set(pair), 0.0) <= LARGE + 60 * MIB, "shared pages count once, by halves"


def test_who_is_gone_is_no_trouble() -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    assert of_their_own({gone.pid}) == {gone.pid}
