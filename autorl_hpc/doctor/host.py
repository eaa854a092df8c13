"""Check this host: Python, limits, GPUs, sandboxes, programs of agents and graders; on a node jobs of the doctor run it by
`python -m autorl_hpc.doctor.host OUT.json GPUS FOLDER ...`."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path

from autorl_hpc import __version__
from autorl_hpc.agents import agent_names, load_agent
from autorl_hpc.agents.program_check import (
    PROGRAM_LIMIT_S,
    SETUP_LIMIT_S,
    TORCH_LIMIT_S,
    TORCH_SAYS,
    Looked,
    Where,
    has_checks,
    look,
    look_at_torch,
    unseen_gpus,
    where_agents_run,
)
from autorl_hpc.cluster.vllm_program import PYTHON_LIMIT_S, VllmOnHost, look_for_engine
from autorl_hpc.doctor import storage
from autorl_hpc.doctor.finding import (
    Check,
    Finding,
    State,
    ask,
    examine,
    note,
    ok,
    problem,
    said,
    unknown,
    warning,
)
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.redact import site_variables
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.sandbox.levels import LEVELS, Level
from autorl_hpc.sandbox.prove import probe
from autorl_hpc.sandbox.sandbox_plan import (
    SHORT,
    SOCKET_NAME,
    SandboxPlan,
    devices,
    lay_way_out,
    slurm_programs,
    software,
)
from autorl_hpc.states import Network, SandboxLevel

LEAST_FILES = 1024
SLOW_IMPORT_S = 15.0
MODULES = ("pydantic", "yaml", "numpy", "submitit", "typer", "rich", "jinja2")  # what jobs import


def packages() -> Finding:
    """Import what jobs need, and measure the time: a shared file system may be slow with small files."""
    name, began = "Python and packages", time.monotonic()
    try:
        for module in MODULES:
            importlib.import_module(module)
    except ImportError as error:
        advice = "set `python` in the cluster's profile to one with autorl-hpc installed, on a file system nodes see"
        return problem(name, f"{sys.executable}: {error}", "jobs end at their first line", advice)
    took = time.monotonic() - began
    value = f"{platform.python_version()}, autorl-hpc {__version__}, imported in {took:.1f} s"
    if took > SLOW_IMPORT_S:
        return warning(name, value, "every job starts that late", "put the environment on a faster file system")
    return ok(name, value)


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{soft} (may be raised to {hard})"
    if 0 <= soft < LEAST_FILES:
        so_what = "data loaders and checkpoints in many shards fail with `too many open files`"
        return warning("open files", value, so_what, f"`setup: [ulimit -n {hard}]` in the cluster's profile")
    return ok("open files", value)


OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def offline(environment: Mapping[str, str]) -> list[Finding]:
    """Tell the variables that are set; nothing is contacted, and no proxy's address is shown."""
    value = ", ".join(f"{name}={environment[name]}" for name in OFFLINE if environment.get(name)) or "none set"
    found = [ok("offline variables", f"{value}; agents get HF_HUB_OFFLINE=1, TRANSFORMERS_OFFLINE=1")]
    if proxies := sorted({name.lower() for name in environment if name.lower() in PROXIES and environment[name]}):
        so_what = "agents don't get them: what an agent downloads through a proxy fails"
        advice = "stage what agents need before (autorl-hpc stage)"
        found.append(note("proxies", f"set: {', '.join(proxies)}", so_what, advice))
    return found


# GPUs as a host shows them, and as a job is told which are its own

SMI_LIMIT_S = 30.0  # a host with eight cards and no persistence daemon wakes them one by one


def cards() -> Finding:
    """Count the names of cards and MIG slices that `nvidia-smi -L` lists."""
    answer = ask("nvidia-smi", "-L", limit_s=SMI_LIMIT_S)
    if answer.missing:
        return ok("cards", "no nvidia-smi on this host")
    names = Counter(re.findall(r"(?m)^GPU \d+: (.+?) \(UUID: \S+\)", answer.out))
    if answer.code != 0 or not names:
        so_what = "programs here will find no GPU"
        return unknown("cards", f"nvidia-smi says: {said(answer)}", so_what, "none is needed on a login node")
    names.update(f"MIG {name}" for name in re.findall(r"(?m)^\s+MIG (\S+)", answer.out))
    return ok("cards", ", ".join(f"{count} x {name}" for name, count in names.items()))


def visible(environment: Mapping[str, str], asked: int | None = None) -> Finding:
    """Judge CUDA_VISIBLE_DEVICES. `asked` is how many GPUs this process's job asked for; None: it is in no job."""
    name = "CUDA_VISIBLE_DEVICES"
    text = environment.get(name)
    if text is None:
        if not asked:
            return ok(name, "not set")
        so_what = "Slurm doesn't tell a job which GPUs are its own: jobs on one node use the same ones"
        value = f"not set, though the job asked for {asked}"
        return warning(name, value, so_what, "set `gpu_wording` as the site asks")
    parts = [part.strip() for part in text.split(",") if part.strip()]
    value = text or "empty: no GPU"
    if asked is not None and len(parts) != asked:
        advice = "see `gpu_wording` and `gpu_type` of the cluster's profile"
        return warning(name, value, f"the job asked for {asked}", advice)
    if not all(map(str.isdigit, parts)):
        so_what = "programs that take the names in CUDA_VISIBLE_DEVICES for numbers fail"
        return note(name, value, so_what, "look them up with nvidia-smi -L; agents get the variable as it is")
    return ok(name, value)


def torch_sees(asked: int) -> list[Finding]:
    """Ask the torch that agents of this job would use whether it sees the job's GPUs."""
    answer = ask(sys.executable, "-c", TORCH_SAYS, limit_s=TORCH_LIMIT_S)
    why = unseen_gpus(answer.out, asked)
    if why is None:
        return [ok("torch", f"sees the job's GPUs: {answer.out.strip()}")] if answer.code == 0 else []
    so_what = "agents train on the CPU, or fail, while the GPUs that they are charged for stand idle"
    return [problem("torch", why, so_what, "install a torch that is built for these GPUs and their driver")]


# Which sandbox levels work here, by doing what an agent might: see sandbox/prove.py

PORT = 29570  # inside, where the way out is tried; one of those that level landlock leaves open


def check_sandbox() -> list[Finding]:
    """Tell the level that runs on this host would have, then what each level stops."""
    tried = [level for level in LEVELS if level.name not in (SandboxLevel.NONE, SandboxLevel.APPTAINER)]
    with tempfile.TemporaryDirectory(prefix="autorl-", dir=SHORT) as folder:
        plan = _trial_plan(Path(folder))
        found = [_level(level, plan) for level in tried]
    so_what = "an agent could read held-out items, ledgers and your files: such scores never rank"
    advice = "ask for user namespaces, or for a kernel with Landlock (5.13; 6.7 closes TCP too)"
    first = note("level of runs", "none", so_what, advice)
    if works := [finding for finding in found if finding.state is State.OK]:
        first = ok("level of runs", f"{works[0].check} on a host like this one")
    return [first, *found, _container()]


def _level(level: Level, plan: SandboxPlan) -> Finding:
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": f"{plan.workspace}/.home", "TMPDIR": plan.tmp}
    if level.name is SandboxLevel.LANDLOCK:
        link = Path(plan.placed[0][1])
        link.rmdir()
        link.symlink_to(plan.placed[0][0])
    try:
        result = probe(level, plan, env, secret=[f"{plan.hidden[0]}/items"], programs=plan.masked)
        failures = "; ".join(result.failures)
    except (OSError, subprocess.SubprocessError) as error:
        failures = f"can't be tried: {error}"
    if failures:
        return note(level.name, failures, "this level is not used here")
    start = "" if result.start_s is None else f", {1000 * result.start_s:.0f} ms to start a program"
    stops = "stops all that was tried" if not result.holes else "does not stop: " + "; ".join(result.holes)
    return ok(level.name, f"works{start}; {stops}")


def _container() -> Finding:
    program = next(filter(shutil.which, ("apptainer", "singularity")), None)
    if program is not None:
        return ok("apptainer", f"{program} is here; it is tried in runs whose environment is an image")
    advice = "often a module: module avail apptainer"
    return note("apptainer", "not here", "environments that are images can't be used", advice)


def _trial_plan(folder: Path) -> SandboxPlan:
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


# Programs of agents and graders: most experiments need few of them, so a missing one is no problem yet


def check_agents(profile: ClusterProfile | None, root: Path) -> list[Finding]:
    where: list[Where] = []

    def path_of_jobs() -> list[Finding]:
        where.append(where_agents_run(profile))
        if where[0].doubt:
            so_what = "agents are looked for on this host's PATH"
            return [warning("PATH of jobs", where[0].doubt, so_what, "correct them")]
        found = [ok("PATH of jobs", where[0].path)]
        names = () if profile is None else profile.agent_variables
        given = dict(sorted(site_variables(names, where[0].environ).items()))
        if given:
            found.append(ok("variables of jobs", ", ".join(f"{name}={value}" for name, value in given.items())))
        if missing := ", ".join(name for name in names if not site_variables([name], given)):
            so_what = "agents don't get what the profile's `agent_variables` names"
            advice = "set it in `setup`, unless nodes do"
            found.append(note("variables of jobs", f"not set: {missing}", so_what, advice))
        return found

    found = examine("Agents", Check("PATH of jobs", path_of_jobs, SETUP_LIMIT_S + 5))
    limit_s = 2 * PROGRAM_LIMIT_S + 5
    gpus = (profile.agent.gpus or 0) if profile is not None else 0
    checks = [Check(name, partial(_agent, name, each, root, gpus), limit_s) for each in where for name in agent_names()]
    return found + examine("Agents", *checks)


def _agent(name: str, where: Where, root: Path, gpus: int) -> list[Finding]:
    try:
        agent = load_agent(name)
    except AutorlError as error:
        return [warning(name, error.what, "an experiment with it can't be launched", error.next_step or "")]
    seen = look(agent, where, hidden=(root,)) if has_checks(agent.file) else []
    if agent.file.env:  # of others' torch the job of the trial tells
        seen += look_at_torch([agent], where, gpus, (root,))
    return [_judged(name, each, "an experiment with it is refused", "it may work") for each in seen]


def _judged(name: str, seen: Looked | VllmOnHost, refused: str, else_: str) -> Finding:
    if seen.state == "ok":
        return ok(name, seen.value)
    return note(name, seen.value, refused if seen.state == "problem" else else_, seen.do_this)


def check_engine(profile: ClusterProfile | None) -> list[Finding]:
    def engine() -> Finding:
        where = where_agents_run(profile)
        asked = "an experiment with `grader: {engine: vllm}`"
        seen = look_for_engine(profile, where.environ, where.doubt)
        return _judged("vLLM", seen, f"{asked} is refused", f"{asked} may find none")

    return examine("Graders", Check("vLLM", engine, SETUP_LIMIT_S + 2 * PYTHON_LIMIT_S + 5))


def checks(asked: int | None = None) -> dict[str, list[Check]]:
    """Return the checks of this host, by group; see `visible` for `asked`."""
    env = os.environ
    return {
        "GPUs of this host": [Check("GPUs", lambda: [cards(), visible(env, asked)], 40.0)],
        **({"GPUs, by torch": [Check("torch", partial(torch_sees, asked), TORCH_LIMIT_S + 5)]} if asked else {}),
        "Sandbox, on this host": [Check("sandbox", check_sandbox, 60.0)],
        "This host": [
            Check("offline variables", lambda: offline(env)),
            Check("Python and packages", packages, 60.0),
            Check("open files", open_files),
        ],
    }


# What a job sees on its node, under the Python that jobs use


def folder_seen(name: str, path: Path) -> Finding:
    if not path.is_dir():
        so_what = "jobs find nothing of what they need, or make a workspace that nobody else sees"
        return problem(name, f"{path} is not on this node", so_what, "give a folder that all nodes share")
    if not os.access(path, os.W_OK | os.X_OK):
        value = f"{path} may not be written to from this node"
        return problem(name, value, "jobs can't record anything", "mount it for writing")
    mount = storage.mount_of(path)
    return ok(name, f"{path} is there ({mount.told if mount else 'unknown kind'})")


def main(out: str, asked: str, *folders: str) -> int:
    """Write the findings of a job; the file appears by rename."""
    named = zip(("root", "scratch"), map(Path, folders), strict=False)
    of_suite = [Check(name, partial(folder_seen, name, path)) for name, path in named]
    found = examine("", *of_suite, *chain(*checks(int(asked)).values()))
    rows = [each.as_json() for each in found if each.check != "level of runs"]
    Path(f"{out}.tmp").write_text(json.dumps(rows), encoding="utf-8")
    Path(f"{out}.tmp").rename(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
