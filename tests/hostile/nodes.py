"""Two nodes on one machine: each a mount of its own of one folder (lagging_fs.py), and processes that see nothing else.

A process of a node runs in namespaces of its own: the common root is that node's mount there, other nodes' processes can't
be seen, and everything that it started ends with it, as on a node that is lost. Only the test, outside, sees the truth.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CACHE_S = 3.0
MOUNT_TIMEOUT_S = 120.0
UNMOUNT_TIMEOUT_S = 0.5
ISOLATE = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
ENTER = 'mount --bind "$1" "$2" && cd "$2" && shift 2 && "$@"; exit $?'
"""No exec: the shell is process 1 of the node, which no signal but KILL ends by default; the suite's process is an ordinary one."""


def what_is_missing() -> str | None:
    """Why two nodes can't be had here; None if they can."""
    if os.geteuid() != 0:
        return "mounts and namespaces need root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed (it is in the extra `test`)"
    if ctypes.util.find_library("fuse3") is None:
        return "libfuse3 is not installed"
    if shutil.which("unshare") is None:
        return "there is no unshare (util-linux)"
    tried = subprocess.run([*ISOLATE, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Node:
    """One mount of `backing`, and a way to run commands that see it at `root`."""

    def __init__(
        self, name: str, backing: Path, folder: Path, *, cache_s: float = CACHE_S, skew_s: float = 0.0
    ) -> None:
        self.name = name
        self.mount = folder / f"node-{name}"
        self.mount.mkdir()
        self._control = folder / f"faults-{name}.json"
        self._log = folder / f"mount-{name}.log"
        command = [sys.executable, str(HERE / "lagging_fs.py"), str(backing), str(self.mount)]
        command += [f"--cache-s={cache_s}", f"--skew-s={skew_s}", f"--faults={self._control}"]
        env = {**os.environ, "FUSE_LIBRARY_NAME": "fuse3"}
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        deadline = time.monotonic() + MOUNT_TIMEOUT_S
        while not os.path.ismount(self.mount):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.unmount()
                raise RuntimeError(f"node {name} has no file system: {self._log.read_text()}")
            time.sleep(0.02)

    def faulty(self, *rules: dict[str, Any]) -> None:
        """From now on these faults (see faults.py), and no others."""
        fresh = self._control.with_suffix(".new")
        fresh.write_text(json.dumps(rules))
        os.replace(fresh, self._control)

    def injected(self) -> list[str]:
        """The faults so far: lines `ERRNO op path`."""
        log = Path(f"{self._control}.log")
        return log.read_text().splitlines() if log.exists() else []

    def complaints(self) -> str:
        """What the file system's own process has said: nothing, if it works."""
        return self._log.read_text()

    def command(self, root: Path, *argv: str) -> list[str]:
        """The command on this node, with `root` as its working directory."""
        return [*ISOLATE, "sh", "-c", ENTER, self.name, str(self.mount), str(root), *argv]

    def unmount(self) -> None:
        """Unmounts, also under processes that still use it, and ends the mount's process, for which it is then broken."""
        subprocess.run(["umount", "--lazy", str(self.mount)], capture_output=True, check=False)
        try:
            self.process.wait(UNMOUNT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ahead(seconds: float) -> dict[str, str]:
    """Variables that put a Python process's wall clock ahead; PYTHONPATH is to be completed by what else is needed."""
    return {"PYTHONPATH": str(HERE / "clock_ahead"), "CLOCK_AHEAD_S": str(seconds)}
