"""Which sandbox levels work here, by doing what an agent might: see sandbox/probing.py."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from autorl_hpc.doctor.finding import Finding, State, note, ok
from autorl_hpc.doctor.tools import ask
from autorl_hpc.sandbox.levels import LEVELS, Level
from autorl_hpc.sandbox.plan import SOCKET_NAME, Plan, devices, lay_way_out, slurm_programs, software
from autorl_hpc.sandbox.probing import probe
from autorl_hpc.states import Network, SandboxLevel

UNRANKED = "an agent could read held-out items, ledgers and your files: such scores never rank"
PORT = 29570
"""Inside, where the way out is tried; one of those that level landlock leaves open."""


def everything() -> list[Finding]:
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


def _level(level: Level, plan: Plan) -> Finding:
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


def _trial_plan(folder: Path) -> Plan:
    """A made-up world like that of an agent."""
    for name in ("vault", "store/data", "runs", "scratch/w/.tmp", "scratch/w/.home", "scratch/w/data", "socket"):
        (folder / name).mkdir(parents=True)
    for name in ("vault/items", "store/data/train", "runs/run.json"):
        (folder / name).write_text("x", encoding="ascii")
    lay_way_out(str(folder / "socket"))
    workspace, outer = folder / "scratch" / "w", dict(os.environ)
    return Plan(
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
