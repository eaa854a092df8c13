"""What Slurm says of itself: clients, accounting, what it remembers and allows, what it does to jobs that must go."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping

from autorl_hpc.cluster import commands
from autorl_hpc.doctor.finding import Finding, note, ok, problem, unknown, warning
from autorl_hpc.doctor.tools import span
from autorl_hpc.records.cluster import ClusterProfile

Config = Mapping[str, str]
"""`scontrol show config`: names and values as Slurm prints them."""

ASK_S = 15.0
SLOW_S = 5.0
"""The watcher asks every half minute; a controller that takes longer than this is overloaded."""

OLDEST = (20, 11)
"""States and options were read from the manuals of 20.11 to 25.05; tests run under 22.05."""

SHORT_MEMORY_S = 120.0
SHORT_KILL_S = 10.0
LITTLE_MEMORY_MIB = 4096
CLIENTS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")


def clients() -> Finding:
    """Whether they are on this host."""
    missing = [name for name in CLIENTS if shutil.which(name) is None]
    if not missing:
        return ok("clients", "all here")
    if len(missing) == len(CLIENTS):
        so_what = "jobs can't be submitted from here; everything can run on this machine alone"
        return note("clients", "none on this host", so_what, "work on a login node, or use `cluster: local`")
    so_what = "launch and its watcher call them"
    return problem("clients", f"missing: {', '.join(missing)}", so_what, "add Slurm's bin folder to PATH")


def answered(config: Config, took_s: float) -> Finding:
    """The controller, and how quickly it speaks."""
    value = f"{config.get('ClusterName', 'no name')} answers in {span(took_s)}"
    if took_s > SLOW_S:
        return warning("controller", value, "a busy scheduler: what became of jobs is known late", "launch fewer jobs")
    return ok("controller", value)


def silent(error: commands.SchedulerError) -> Finding:
    """The controller doesn't answer."""
    so_what = "nothing can be submitted or looked up now"
    return problem("controller", error.what, so_what, error.next_step or "try again later")


def version(config: Config) -> Finding:
    """Slurm's own."""
    text = config.get("SLURM_VERSION", "")
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        return unknown("version", text or "not told")
    if (int(match[1]), int(match[2])) < OLDEST:
        so_what = "older than what this suite was made for: 20.11 and later"
        return warning("version", text, so_what, "try `launch` with one short run first")
    return ok("version", text)


def accounting(config: Config) -> Finding:
    """Whether sacct knows what became of jobs that squeue has forgotten."""
    storage = config.get("AccountingStorageType", "not told").removeprefix("accounting_storage/")
    memory = config.get("MinJobAge", "MinJobAge")
    lost = f"how a job ended is known for {memory} after its end, then only from what it wrote itself"
    began = time.monotonic()
    try:
        commands.run(["sacct", "--noheader", "--allocations", "--parsable2", "--starttime=now-1hour"], timeout_s=ASK_S)
    except commands.SchedulerError as error:
        if storage in ("none", "(null)"):
            return note("accounting", f"{storage}: sacct knows nothing", lost, "nothing: the suite does without")
        return warning("accounting", f"{storage}; {error.what}", lost, "tell the site's people, if it stays so")
    return ok("accounting", f"{storage}, sacct answers in {span(time.monotonic() - began)}")


def min_job_age(config: Config) -> Finding:
    """How long ended jobs stay in squeue."""
    seconds = _seconds(config.get("MinJobAge"))
    if seconds is None:
        return unknown("MinJobAge", config.get("MinJobAge", "not told"))
    value = "0: ended jobs are never forgotten" if seconds == 0 else f"{seconds:.0f} s"
    if 0 < seconds < SHORT_MEMORY_S:
        so_what = "the end of a job may be missed between two looks; without accounting its reason is lost then"
        return note("MinJobAge", value, so_what, "nothing: the run is judged by its own files")
    return ok("MinJobAge", value)


def max_array_size(config: Config, profile: ClusterProfile | None) -> Finding:
    """Arrays."""
    text = config.get("MaxArraySize", "")
    if not text.isdigit():
        return unknown("MaxArraySize", text or "not told", "arrays are kept below 1001 then")
    count = int(text)
    own = profile.limits.max_array_size if profile else None
    if own and own > count:
        so_what = "sbatch refuses an array that is larger"
        value = f"{count}, and the profile says {own}"
        return problem("MaxArraySize", value, so_what, f"`limits: {{max_array_size: {count}}}` in the profile, or none")
    if count <= 1:
        return problem("MaxArraySize", f"{count}: arrays are off", "agents are submitted as arrays", "ask the site")
    return ok("MaxArraySize", f"{count}; larger experiments are split")


def kill_wait(config: Config) -> Finding:
    """Between TERM and KILL."""
    seconds = _seconds(config.get("KillWait"))
    if seconds is None:
        return unknown("KillWait", config.get("KillWait", "not told"))
    if seconds < SHORT_KILL_S:
        so_what = "a job at its time limit, or cancelled, has that long to end; the next attempt takes in what is left"
        return note("KillWait", f"{seconds:.0f} s", so_what, "keep `signal_before_end` at a minute or more")
    return ok("KillWait", f"{seconds:.0f} s")


def requeue(config: Config, profile: ClusterProfile | None) -> Finding:
    """Whether jobs of a dead node come back."""
    on = config.get("JobRequeue") == "1"
    asked = profile is None or profile.requeue
    value = f"{'on' if on else 'off'} by default; the profile {'asks for it' if asked else 'forbids it'}"
    if profile is None:
        value = "on" if on else "off by default; each job asks for it"
    if not asked:
        so_what = "a run whose node dies stays interrupted"
        return note("JobRequeue", value, so_what, "launch again: it goes on where it stopped")
    return ok("JobRequeue", value)


def preemption(config: Config) -> Finding:
    """What happens to a job whose place a better one takes."""
    kind = config.get("PreemptType", "not told").removeprefix("preempt/")
    if kind in ("none", "(null)", "not told"):
        return ok("preemption", "none" if kind != "not told" else kind)
    mode = config.get("PreemptMode", "?")
    told = "preempt_send_user_signal" in config.get("SlurmctldParameters", "")
    value = f"{kind}, {mode}; {'the job is told first' if told else 'no signal of ours goes before TERM'}"
    so_what = "a run that is preempted goes on in its next attempt; its clock stands still meanwhile"
    if "CANCEL" in mode:
        return note("preemption", value, so_what.replace("goes on", "must be launched again, and goes on"), "")
    return note("preemption", value, so_what, "" if told else "agents lose what they have not saved")


def memory_default(config: Config, profile: ClusterProfile | None) -> Finding:
    """What a job gets that names no memory."""
    name = next((n for n in ("DefMemPerGPU", "DefMemPerCPU", "DefMemPerNode") if config.get(n, "").isdigit()), None)
    named = profile is not None and all(kind.memory for kind in (profile.agent, profile.grader))
    if named:
        return ok("memory of jobs", "the profile names it")
    if name is None:
        so_what = "a job that names no memory may take a whole node's, and wait for a whole node"
        return note("memory of jobs", "no default", so_what, "`memory: 64G` under agent and grader in the profile")
    count = int(config[name])
    value = f"{count} MB per {name.removeprefix('DefMemPer')} for a job that names none"
    cpus = (profile.agent.cpus or 1) if profile is not None else 1
    if name != "DefMemPerGPU" and count * (cpus if name == "DefMemPerCPU" else 1) < LITTLE_MEMORY_MIB:
        so_what = "an import of torch takes some GB: such jobs end OUT_OF_MEMORY, or FAILED"
        return warning("memory of jobs", value, so_what, "`memory: 64G` under agent and grader in the profile")
    return ok("memory of jobs", value)


def _seconds(text: str | None) -> float | None:
    """Of `300 sec`."""
    match = re.match(r"(\d+)\s*(sec|$)", text or "")
    return float(match[1]) if match else None


def everything(config: Config, profile: ClusterProfile | None) -> list[Finding]:
    """All that stands in the configuration."""
    return [
        version(config),
        accounting(config),
        min_job_age(config),
        max_array_size(config, profile),
        kill_wait(config),
        requeue(config, profile),
        preemption(config),
        memory_default(config, profile),
    ]
