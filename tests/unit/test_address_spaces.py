"""Memory of a process whose child has not exec'd yet: subprocess forks without a copy, and the kernel shows everything twice."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from helpers import wait_for

from autorl_hpc.files.processes import KCMP, KCMP_VM, memory_bytes, of_their_own

MIB = 2**20
LARGE = 100 * MIB

STARTS = f"""
import ctypes, os, sys
x = bytearray({LARGE})
libc = ctypes.CDLL(None)
if sys.argv[1] == "fork":
    os.fork()
    libc.pause()
stack = ctypes.create_string_buffer(1 << 16)
top = ctypes.addressof(stack) + (1 << 16) - 64
libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), ctypes.c_void_p(top), 0x4100 | 17, None)  # CLONE_VM | CLONE_VFORK
"""
"""A large process with a child that shares all of its memory (and can't have exec'd), or a copy of it."""


def _kcmp_works() -> bool:
    number = KCMP.get(platform.machine())
    return number is not None and ctypes.CDLL(None).syscall(number, os.getpid(), os.getpid(), KCMP_VM, 0, 0) == 0


@needs.needs("kernel", _kcmp_works(), "this kernel does not compare processes")
@pytest.mark.parametrize("how", ["vfork", "fork"])
def test_memory_that_a_child_shares_counts_once(how: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", STARTS, how], start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        (child,) = map(int, wait_for(lambda: children.read_text().split(), "the child"))
        both = {process.pid, child}
        assert of_their_own(both) == ({process.pid} if how == "vfork" else both) and of_their_own({child}) == {child}
        for enough in (0.0, 1e12) if how == "vfork" else (0.0,):
            assert LARGE <= memory_bytes(both, enough) <= LARGE + 60 * MIB
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert of_their_own({child}) == {child}, "who is gone is no trouble"
