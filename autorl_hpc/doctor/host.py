"""This host: Python, open files, processes of others, memory, control groups, variables that keep programs offline."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from autorl_hpc import __version__
from autorl_hpc.agents import agent_names, load_agent
from autorl_hpc.agents.program_check import (
    PROGRAM_LIMIT_S,
    SETUP_LIMIT_S,
    Looked,
    Where,
    has_checks,
    look,
    where_agents_run,
)
from autorl_hpc.cluster.vllm_program import PYTHON_LIMIT_S, look_for_engine
from autorl_hpc.doctor.finding import (
    Check,
    Finding,
    State,
    ToolAnswer,
    ask,
    examine,
    note,
    ok,
    problem,
    size,
    span,
    unknown,
    warning,
)
from autorl_hpc.doctor.storage import mounts
from autorl_hpc.errors import AutorlError
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.sandbox.levels import LEVELS, Level
from autorl_hpc.sandbox.prove import probe
from autorl_hpc.sandbox.sandbox_plan import SOCKET_NAME, SandboxPlan, devices, lay_way_out, slurm_programs, software
from autorl_hpc.states import Network, SandboxLevel

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


# GPUs as a host shows them, and as a job is told which are its own.

SMI_LIMIT_S = 30.0
"""A host with eight cards and no persistence daemon wakes them one by one."""

NOT_NUMBERS = "programs that take the names in CUDA_VISIBLE_DEVICES for numbers fail"


def cards() -> Finding:
    """What `nvidia-smi -L` lists."""
    return read_cards(ask(["nvidia-smi", "-L"], limit_s=SMI_LIMIT_S))


def read_cards(answer: ToolAnswer | None) -> Finding:
    """Names, how many of each, and MIG slices."""
    if answer is None:
        return ok("cards", "no nvidia-smi on this host")
    if answer.code != 0:
        so_what = "programs here will find no GPU"
        return unknown("cards", f"nvidia-smi fails: {answer.said}", so_what, "none is needed on a login node")
    names = Counter(re.findall(r"(?m)^GPU \d+: (.+?) \(UUID: \S+\)", answer.out))
    slices = Counter(re.findall(r"(?m)^\s+MIG (\S+)", answer.out))
    if not names:
        return ok("cards", "none") if not answer.out.strip() else unknown("cards", f"nvidia-smi says: {answer.said}")
    value = ", ".join(f"{count} x {name}" for name, count in names.items())
    if slices:
        value += "; MIG: " + ", ".join(f"{count} x {name}" for name, count in slices.items())
        so_what = "a slice has a part of the memory, and one process sees one slice"
        return note("cards", value, so_what, "ask for whole cards for models that need more (`gpu_type`)")
    return ok("cards", value)


def visible(environment: Mapping[str, str], asked: int | None = None) -> Finding:
    """The form of CUDA_VISIBLE_DEVICES.

    Args:
        asked: how many GPUs this process's job asked for; None: it is in no job.
    """
    name = "CUDA_VISIBLE_DEVICES"
    text = environment.get(name)
    if text is None:
        if not asked:
            return ok(name, "not set")
        so_what = "Slurm doesn't tell a job which GPUs are its own: jobs on one node use the same ones"
        return warning(
            name, f"not set, though the job asked for {asked}", so_what, "set `gpu_wording` as the site asks"
        )
    parts = [part for part in text.split(",") if part.strip()]
    forms = {_form(part.strip()) for part in parts}
    value = f"{text or 'empty: no GPU'}" + (f" (by {' and '.join(sorted(forms))})" if forms else "")
    if asked is not None and len(parts) != asked:
        so_what = f"the job asked for {asked}"
        return warning(name, value, so_what, "see `gpu_wording` and `gpu_type` of the cluster's profile")
    if forms - {"index"}:
        return note(name, value, NOT_NUMBERS, "look them up with nvidia-smi -L; agents get the variable as it is")
    return ok(name, value)


def _form(part: str) -> str:
    if part.isdigit():
        return "index"
    if part.startswith("MIG-"):
        return "MIG slice"
    return "UUID" if part.startswith("GPU-") else "unknown name"


def check_gpus(environment: Mapping[str, str], asked: int | None = None) -> list[Finding]:
    """Of this host or job."""
    return [cards(), visible(environment, asked)]


# Which sandbox levels work here, by doing what an agent might: see sandbox/probing.py.

UNRANKED = "an agent could read held-out items, ledgers and your files: such scores never rank"
PORT = 29570
"""Inside, where the way out is tried; one of those that level landlock leaves open."""


def check_sandbox() -> list[Finding]:
    """The level that runs on this host would have first, then each level with what it stops."""
    with tempfile.TemporaryDirectory(prefix="autorl-") as folder:
        plan = _trial_plan(Path(folder))
        found = [
            _level(level, plan) for level in LEVELS if level.name not in (SandboxLevel.NONE, SandboxLevel.APPTAINER)
        ]
    works = [finding for finding in found if finding.state is State.OK]
    if works:
        first = ok("level of runs", f"{works[0].check} on a host like this one")
    else:
        first = note(
            "level of runs",
            "none",
            UNRANKED,
            "ask for user namespaces, or for a kernel with Landlock (5.13; 6.7 closes TCP too)",
        )
    return [first, *found, _container()]


def _level(level: Level, plan: SandboxPlan) -> Finding:
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": f"{plan.workspace}/.home", "TMPDIR": plan.tmp}
    if level.name is SandboxLevel.LANDLOCK:
        link = Path(plan.placed[0][1])
        link.rmdir()
        link.symlink_to(plan.placed[0][0])
    try:
        result = probe(level, plan, env, secret=[f"{plan.hidden[0]}/items"], programs=plan.masked)
    except (OSError, subprocess.SubprocessError) as error:
        return note(level.name, f"can't be tried: {error}", "this level is not used here")
    if result.failures:
        return note(level.name, "; ".join(result.failures)[:400], "this level is not used here")
    start = "" if result.start_s is None else f", {1000 * result.start_s:.0f} ms to start a program"
    stops = "stops all that was tried" if not result.holes else "does not stop: " + "; ".join(result.holes)
    return ok(level.name, f"works{start}; {stops}")


def _container() -> Finding:
    for name in ("apptainer", "singularity"):
        answer = ask([name, "--version"])
        if answer is not None and answer.code == 0:
            return ok(
                "apptainer", f"{answer.out.strip()} (its version; it is tried in runs whose environment is an image)"
            )
        if answer is not None:
            return note("apptainer", f"there, but fails: {answer.said}", "environments that are images can't be used")
    return note(
        "apptainer", "not here", "environments that are images can't be used", "often a module: module avail apptainer"
    )


def _trial_plan(folder: Path) -> SandboxPlan:
    """A made-up world like that of an agent."""
    for name in ("vault", "store/data", "runs", "scratch/w/.tmp", "scratch/w/.home", "scratch/w/data", "socket"):
        (folder / name).mkdir(parents=True)
    for name in ("vault/items", "store/data/train", "runs/run.json"):
        (folder / name).write_text("x", encoding="ascii")
    lay_way_out(str(folder / "socket"))
    workspace, outer = folder / "scratch" / "w", dict(os.environ)
    return SandboxPlan(
        workspace=str(workspace),
        tmp=str(workspace / ".tmp"),
        readable=tuple(software([sys.prefix, sys.base_prefix], outer)),
        hidden=tuple(str(folder / name) for name in ("vault", "store", "runs", "scratch")),
        placed=((str(folder / "store" / "data"), str(workspace / "data")),),
        devices=tuple(devices()),
        masked=tuple(slurm_programs(outer)),
        network=Network.NONE,
        socket_folder=str(folder / "socket"),
        ways=((PORT, SOCKET_NAME),),
    )


# The programs of agents on this host: most people have some of them, so one that is not here is no problem yet.

AGENTS_GROUP = "Agents"


def check_agents(profile: ClusterProfile | None) -> list[Finding]:
    """One finding or more for each agent that has a program."""
    where: list[Where] = []

    def jobs() -> Finding:
        where.append(where_agents_run(profile))
        if where[0].doubt:
            return warning("PATH of jobs", where[0].doubt, "agents are looked for on this host's PATH", "correct them")
        return ok("PATH of jobs", where[0].path)

    found = examine(AGENTS_GROUP, [Check("PATH of jobs", jobs, SETUP_LIMIT_S + 5)])
    if not where:
        return found
    return found + examine(
        AGENTS_GROUP,
        [Check(name, partial(_agent_finding, name, where[0]), 2 * PROGRAM_LIMIT_S + 5) for name in agent_names()],
    )


def _agent_finding(name: str, where: Where) -> list[Finding]:
    try:
        agent = load_agent(name)
    except AutorlError as error:
        return [warning(name, error.what, "an experiment with it can't be launched", error.next_step or "")]
    return [_finding(looked) for looked in look(agent, where)] if has_checks(agent.file) else []


def _finding(looked: Looked) -> Finding:
    if looked.state == "ok":
        return ok(looked.agent, looked.value)
    if looked.state == "note":
        return note(looked.agent, looked.value, "it may work", looked.do_this)
    return note(looked.agent, looked.value, "an experiment with it is refused", looked.do_this)


# vLLM for graders: most experiments do without, so one that is not here is no problem yet.

GRADERS_GROUP = "Graders"


def check_engine(profile: ClusterProfile | None) -> list[Finding]:
    """One finding."""
    return examine(
        GRADERS_GROUP, [Check("vLLM", partial(_engine_finding, profile), SETUP_LIMIT_S + 2 * PYTHON_LIMIT_S + 5)]
    )


def _engine_finding(profile: ClusterProfile | None) -> Finding:
    where = where_agents_run(profile)
    seen = look_for_engine(profile, where.environ, where.doubt)
    if seen.state == "ok":
        return ok("vLLM", seen.value)
    so_what = "an experiment with `grader: {engine: vllm}` " + (
        "is refused" if seen.state == "problem" else "may find none"
    )
    return note("vLLM", seen.value, so_what, seen.do_this)
