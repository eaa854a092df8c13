"""This host: Python, open files, processes of others, memory, control groups, variables that keep programs offline."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from autorl_hpc import __version__
from autorl_hpc.doctor.finding import Finding, note, ok, problem, unknown, warning
from autorl_hpc.doctor.storage import mounts
from autorl_hpc.doctor.tools import size, span

LEAST_OPEN_FILES = 1024
SLOW_IMPORT_S = 15.0
MODULES = ("pydantic", "yaml", "numpy", "submitit", "typer", "rich", "jinja2")
"""What jobs import."""


def python() -> Finding:
    """Which Python, and which autorl-hpc."""
    return ok("Python", f"{platform.python_version()}, autorl-hpc {__version__}")


def imports() -> Finding:
    """Whether this Python has what jobs need, and how long it takes: a shared file system may be slow with small files."""
    import importlib

    missing = []
    began = time.monotonic()
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing.append(f"{name} ({error})")
    took = time.monotonic() - began
    if missing:
        return problem(
            "packages",
            f"missing in {sys.executable}: {', '.join(missing)}",
            "jobs end at their first line",
            "set `python` in the cluster's profile to one that has autorl-hpc installed, on a file system nodes see",
        )
    value = f"all there, imported in {span(took)}"
    if took > SLOW_IMPORT_S:
        return warning("packages", value, "every job starts that late", "put the environment on a faster file system")
    return ok("packages", value)


def open_files() -> Finding:
    """ulimit -n."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{_limit(soft)} (may be raised to {_limit(hard)})"
    if 0 <= soft < LEAST_OPEN_FILES:
        so_what = "data loaders and checkpoints in many shards fail with `too many open files`"
        return warning("open files", value, so_what, f"`setup: [ulimit -n {_limit(hard)}]` in the cluster's profile")
    return ok("open files", value)


def processes_allowed() -> Finding:
    """ulimit -u."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if 0 <= soft < 1024:
        so_what = "it counts all your processes and threads on a host; training starts hundreds"
        return warning("processes of yours", f"at most {soft}", so_what, "work in jobs, or ask for a higher limit")
    return ok("processes of yours", f"at most {_limit(soft)}")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def others(proc: Path = Path("/proc"), uid: int | None = None) -> Finding:
    """Whether processes of other users can be seen."""
    me = os.geteuid() if uid is None else uid
    hidden = [o for m in mounts(proc) if m.kind == "proc" for o in m.options if o.startswith("hidepid=")]
    seen = 0
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                seen += entry.stat().st_uid != me and (entry / "cmdline").read_bytes() != b""
            except OSError:
                continue
    if seen:
        return note(
            "processes of others",
            f"{seen} seen" + (f" ({hidden[-1]})" if hidden else ""),
            "others see your processes' command lines too",
            "never put a key or password on a command line",
        )
    return ok("processes of others", "none seen" + (f" ({hidden[-1]})" if hidden else ""))


def control_groups(cgroup: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Version 1, 2, or none."""
    if (cgroup / "cgroup.controllers").is_file():
        return ok("control groups", "version 2")
    if any((cgroup / name).is_dir() for name in ("memory", "freezer", "pids")):
        return ok("control groups", "version 1")
    return note("control groups", "none", "a job's memory is limited by looking now and then, if at all")


def memory(proc: Path = Path("/proc")) -> Finding:
    """What this host has."""
    for line in (proc / "meminfo").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("MemTotal:"):
            count = int(line.split()[1]) * 1024
            return ok("memory and CPUs", f"{size(count)}, {len(os.sched_getaffinity(0))} CPUs for this process")
    return unknown("memory and CPUs", "/proc/meminfo doesn't tell")


OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def offline(environment: Mapping[str, str]) -> list[Finding]:
    """Only what is set: nothing is contacted."""
    there = [f"{name}={environment[name]}" for name in OFFLINE if environment.get(name)]
    value = ", ".join(there) or "none set"
    found = [ok("offline variables", f"{value}; agents get HF_HUB_OFFLINE=1, TRANSFORMERS_OFFLINE=1")]
    proxies = sorted({name.lower() for name in environment if name.lower() in PROXIES and environment[name]})
    if proxies:
        found.append(
            note(
                "proxies",
                f"set: {', '.join(proxies)}",
                "agents don't get them: what an agent downloads through a proxy fails",
                "stage what agents need before (autorl-hpc stage)",
            )
        )
    else:
        found.append(ok("proxies", "none set"))
    return found


def writable(folder: Path) -> Finding:
    """Whether a new file can be made in the folder, by making one."""
    path = folder / f".autorl-doctor-{os.getpid()}-{os.urandom(4).hex()}"
    name = "write access"
    try:
        path.write_bytes(b"x")
        path.unlink()
    except OSError as error:
        so_what = "nothing can be staged or launched there"
        return problem(name, f"no: {error.strerror}", so_what, "choose a folder that you may write to (--root)")
    return ok(name, "yes")
