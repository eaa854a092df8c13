"""Enters a sandbox by system calls and executes the agent, for the levels `namespaces` and `landlock`: `python -I -B enter.py JSON`. It
starts outside and imports what it needs before the sandbox closes."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autorl_hpc.sandbox import linux

FAILED = 126  # exit code if the sandbox could not be made; the agent did not run
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def main() -> None:
    """Enter and execute the command; print the reason on standard error if that fails."""
    job = json.loads(sys.argv[1])
    try:
        (_landlock if job["level"] == "landlock" else _namespaces)(job)
        os.chdir(job["workspace"])
        os.execvpe(job["command"][0], job["command"], os.environ)
    except OSError as error:
        os.write(2, f"the sandbox could not be entered: {error}\n".encode())
    os._exit(FAILED)


def _landlock(job: dict[str, Any]) -> None:
    from autorl_hpc.sandbox import inside, seccomp
    from autorl_hpc.sandbox.sandbox_plan import carved

    # Resolve links before hidden folders are cut out: a link (/bin) would allow what is hidden under its real name (/usr/bin).
    # Done here because the list for a folder with a few exceptions can exceed the limit of a command line.
    readable = carved(sorted({os.path.realpath(path) for path in job["readable"]}), job["hidden"])
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    rules = [(path, linux.ALL_ACCESS if os.path.isdir(path) else linux.OF_A_FILE) for path in job["writable"]]
    read = linux.READ | linux.EXECUTE
    for path in [*readable, *job["placed"]]:
        rules.append((path, read if os.path.isdir(path) else read & linux.OF_A_FILE))
    # CUDA writes its threads' names there and fails to start without.
    rules.append(("/proc", read | linux.WRITE_FILE | linux.TRUNCATE))
    os.environ["TMPDIR"] = job["tmp"]
    if not os.geteuid():
        linux.drop_capabilities()
    spans = job["ports"]
    linux.apply(rules, None if spans is None else sorted({n for a, b in spans for n in range(a, b + 1)}))
    inside.guard(seccomp.guard_job(shares_ipc=True))
    if spans is not None:
        seccomp.only_tcp()


def _namespaces(job: dict[str, Any]) -> None:
    os.environ["TMPDIR"] = "/tmp"
    linux.unshare(os.geteuid(), os.getegid(), network=not job["open"])
    if child := os.fork():
        # Outside: wait, without the signals that a scheduler sends to all processes, and exit as it did.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        os.closerange(0, 256)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.call("sethostname", job["host"].encode(), ctypes.c_size_t(len(job["host"])))
    if not job["open"]:
        import fcntl
        import socket
        import struct

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:  # the loopback is up
            given = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
            flags = struct.unpack("16sh14x", given)[1] | IFF_UP
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))
    _mount(job)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    os.setsid()
    linux.drop_capabilities()


def _mount(job: dict[str, Any]) -> None:
    """Replace the machine's file system by the sandbox's own."""
    mount, bind = linux.mount, linux.bind
    quiet, root = linux.QUIET, job["root"]
    mount("tmpfs", root, "tmpfs", quiet, "size=4m,mode=755")
    for name in ("proc", "dev", "run", "var", "tmp"):
        os.mkdir(f"{root}/{name}")
    mount("proc", f"{root}/proc", "proc", quiet | linux.MS_NOEXEC, None)
    for path in job["settings"]:
        if os.path.exists(root + path):
            bind(root + path, root + path)
    mount("tmpfs", f"{root}/dev", "tmpfs", linux.MS_NOSUID, "size=1m,mode=755")
    os.mkdir(f"{root}/dev/shm")
    mount("tmpfs", f"{root}/dev/shm", "tmpfs", quiet, "mode=1777")
    os.mkdir(f"{root}/dev/pts")
    try:
        mount("devpts", f"{root}/dev/pts", "devpts", linux.MS_NOSUID, "newinstance,ptmxmode=0666,mode=620")
        os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    except OSError:
        pass  # no terminals inside
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{root}/dev/{name}")
    for device in job["devices"]:
        bind(device, root + device, read_only=False)
    for kind, source, target in job["steps"]:
        where = root + target
        if kind == "link":
            os.symlink(source, where)
        elif kind == "empty":
            os.makedirs(where, exist_ok=True)
            # mount points below are created in it
            mount("tmpfs", where, "tmpfs", quiet, "size=1m,nr_inodes=1024,mode=755")
        else:
            bind(source, where, read_only=kind == "readable")
    os.symlink("/tmp", f"{root}/var/tmp")
    read_only = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY
    mount("none", f"{root}/dev", None, read_only | linux.MS_NOSUID, None)
    linux.enter_root(root)


if __name__ == "__main__":
    main()
