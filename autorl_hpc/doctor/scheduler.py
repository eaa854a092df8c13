"""What Slurm says of itself: clients, accounting, what it remembers and allows, what it does to jobs that must go."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.profile import gpu_options, habit, module_lines, with_variables
from autorl_hpc.cluster.slurm import duration_s
from autorl_hpc.cluster.vllm_program import ask
from autorl_hpc.doctor.finding import Finding, note, ok, problem, span, unknown, warning
from autorl_hpc.files.layout import PACKAGE
from autorl_hpc.files.redact import without_secrets
from autorl_hpc.records.cluster import ClusterProfile, JobKind, Wording

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


def silent(error: slurm.SchedulerError) -> Finding:
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
        slurm.run(["sacct", "--noheader", "--allocations", "--parsable2", "--starttime=now-1hour"], timeout_s=ASK_S)
    except slurm.SchedulerError as error:
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


def check_configuration(config: Config, profile: ClusterProfile | None) -> list[Finding]:
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


# What the doctor's own jobs ask for and run: worded as the profile words real ones, submitted by one function.

SUBMIT_LIMIT_S = 60.0
SHORT_MINUTES = 8
"""Of a probe's job: what a pair may take at most, with a wait for its partner."""

OURS = {"job-name", "output", "error", "time", "array", "dependency", "comment", "signal", "mail-type", "mail-user"}
OURS |= {"parsable", "test-only", "wait", "requeue", "no-requeue", "hold", "begin", "open-mode", "chdir", "wrap"}
"""Options of a profile that a probe sets itself, or that would change what it is."""


@dataclass(frozen=True)
class Request:
    """What a job asks for.

    Attributes:
        kind: of the profile's jobs; its GPUs, CPUs and memory are asked for as they stand.
    """

    profile: ClusterProfile | None
    kind: JobKind
    minutes: int = SHORT_MINUTES
    exclude: str | None = None

    def options(self) -> list[str]:
        """For sbatch, without name and output."""
        profile, kind = self.profile, self.kind
        options = [f"--time={self.minutes}", "--no-requeue", "--open-mode=append"]
        for option in ("partition", "account", "qos", "constraint", "reservation"):
            value = getattr(kind, option) or (getattr(profile, option) if profile else None) or habit(option)
            options += [f"--{option}={value}"] if value else []
        options += [f"--cpus-per-task={kind.cpus}"] if kind.cpus else []
        options += [f"--mem={kind.memory}"] if kind.memory else []
        options += [f"--exclude={self.exclude}"] if self.exclude else []
        gpus = [f"--{name}={value}" for name, value in gpu_options(profile, kind).items()]
        return [*options, *gpus, *self._further()]

    def describe(self) -> str:
        """Such as `1 GPU, 1 CPU, 8 min in gpu`."""
        kind, profile = self.kind, self.profile
        where = kind.partition or (profile.partition if profile else None) or habit("partition")
        counts = [(kind.gpus, "GPU"), (kind.cpus, "CPU")]
        parts = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count]
        return ", ".join([*parts, f"{self.minutes} min"]) + f" in {where or 'the default partition'}"

    def _further(self) -> list[str]:
        given = {**(self.profile.sbatch if self.profile else {}), **self.kind.sbatch}
        kept = {name: value for name, value in given.items() if name not in OURS and value is not False}
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in kept.items()]


def sbatch(script: str, options: Sequence[str]) -> tuple[str, str]:
    """What sbatch prints and what it says beside that; the script is its input.

    Raises:
        SchedulerError: it refused, is not here, or did not answer.
    """
    env = without_secrets(slurm.without_scheduler(os.environ))
    env.pop("PYTHONPATH", None)
    answer = ask(["sbatch", "--parsable", *options], env={**env, "LC_ALL": "C"}, limit_s=SUBMIT_LIMIT_S, given=script)
    if answer.code != 0:
        words = re.sub(r"(?m)^(sbatch: (error: )?|allocation failure: )", "", answer.err or answer.out)
        raise slurm.failed("sbatch", words)
    return answer.out.strip(), answer.err.strip()


def script(profile: ClusterProfile | None, folder: Path, side: str, gpus: int, folders: Sequence[Path]) -> str:
    """The job of one side: a real job's modules, setup and Python; first what the node shows, beside it the pair."""
    place = shlex.quote(str(folder))
    lines = ["#!/bin/bash", *module_lines(profile)]
    lines += profile.setup if profile is not None else ()
    code = shlex.quote(str(PACKAGE.parent))
    if profile is not None and profile.container is None and (profile.modules or profile.setup):
        code += "${PYTHONPATH:+:$PYTHONPATH}"
    lines += [f"export PYTHONPATH={code} PYTHONDONTWRITEBYTECODE=1", f"cd {place} || exit"]
    seen = " ".join(shlex.quote(str(path)) for path in (folder.parent, *folders))
    lines += [
        f'run() {{ {_python(profile, [folder.parent, *folders])} "$@"; }}',
        f"run -c '' 2>python-{side}.log || {{ echo >fallback-{side}; run() {{ python3 \"$@\"; }}; }}",
        f"run -m autorl_hpc.doctor.node {place}/node-{side}.json {gpus} {seen} >node-{side}.log 2>&1 &",
        f"run pair.py {place} {side}",
    ]
    return "\n".join([*lines, "wait", ""])


def _python(profile: ClusterProfile | None, folders: Sequence[Path]) -> str:
    if profile is None or (profile.container is None and profile.python is None):
        return shlex.quote(sys.executable)
    if profile.container is None:
        return with_variables(profile.python or "")
    container = profile.container
    words = [*container.options, *(f"--bind={folder}" for folder in folders)]
    options = " ".join(shlex.quote(word) for word in words)
    return f"{container.runtime} exec {options} {with_variables(container.image)} {shlex.quote(container.python)}"


def cancel(name: str) -> None:
    """Whatever runs or waits under this name of ours: also a job whose number sbatch never told.

    Raises:
        SchedulerError: the scheduler doesn't answer.
    """
    slurm.run(["scancel", f"--name={name}", f"--user={os.geteuid()}"])


# Partitions, their GPUs, and whether the profile's jobs would be taken, by the scheduler's own mouth.

MANY = 8
"""Partitions of their own line; more are named in one."""

HOUR_MINUTES = 60


@dataclass
class Partition:
    """One partition, as scontrol and sinfo tell it."""

    name: str
    default: bool = False
    up: bool = True
    max_time_s: float | None = None
    preempt: str = "OFF"
    grace_s: float = 0.0
    usable: int = 0
    nodes: int = 0
    gpus: dict[str, int] = field(default_factory=dict)
    """By type (`` where there is none): the most that one node has."""


def read(scontrol: str, sinfo: str) -> dict[str, Partition]:
    """From `scontrol --oneliner show partition` and `sinfo --format=%R|%F|%G`."""
    found: dict[str, Partition] = {}
    for line in scontrol.splitlines():
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        name = words.get("PartitionName")
        if not name:
            continue
        grace = words.get("GraceTime", "0")
        found[name] = Partition(
            name=name,
            default=words.get("Default") == "YES",
            up=words.get("State", "UP") == "UP",
            max_time_s=duration_s(words.get("MaxTime", "")),
            preempt=words.get("PreemptMode", "OFF"),
            grace_s=float(grace) if grace.isdigit() else 0.0,
        )
    for line in sinfo.splitlines():
        parts = line.split("|", 2)
        if len(parts) != 3 or parts[0] not in found:
            continue
        partition = found[parts[0]]
        counts = [int(count) if count.isdigit() else 0 for count in parts[1].split("/")]
        if len(counts) == 4:  # allocated/idle/other/total
            partition.usable += counts[0] + counts[1]
            partition.nodes += counts[3]
        for kind, count in gres(parts[2]).items():
            partition.gpus[kind] = max(partition.gpus.get(kind, 0), count)
    return found


def gres(text: str) -> dict[str, int]:
    """GPUs of one node, by type: `gpu:a100:4(S:0-1),gpu:2,lscratch:1` gives {a100: 4, '': 2}."""
    found: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        match = re.fullmatch(r"gpu(?::([^:=]+(?=:)))?[:=](\d+)[KM]?|gpu:([^:=\d][^:=]*)|gpu", item.strip())
        if match:
            kind = match[1] or match[3] or ""
            found[kind] = found.get(kind, 0) + int(match[2] or 1)
    return found


def check_partitions(config: dict[str, str], profile: ClusterProfile | None) -> list[Finding]:
    """Partitions, GPUs as they are named, and a dry submission of each kind of job."""
    try:
        known = read(
            slurm.run(["scontrol", "--oneliner", "show", "partition"], timeout_s=ASK_S),
            slurm.run(["sinfo", "--noheader", "--format=%R|%F|%G"], timeout_s=ASK_S),
        )
    except slurm.SchedulerError as error:
        return [unknown("partitions", error.what)]
    preempts = config.get("PreemptType", "preempt/none") not in ("preempt/none", "(null)", "")
    return [*lines(known, profile, preempts), gpu_names(known, profile), *dry(profile, known)]


def wanted(profile: ClusterProfile | None, known: dict[str, Partition]) -> list[str]:
    """The partitions that jobs would go to."""
    default = habit("partition") or next((p.name for p in known.values() if p.default), None)
    if profile is None:
        return default.split(",") if default else []
    names = [kind.partition or profile.partition or default or "" for kind in _kinds(profile).values()]
    return list(dict.fromkeys(part for name in names for part in name.split(",") if part))


def _kinds(profile: ClusterProfile) -> dict[str, JobKind]:
    return {"agent": profile.agent, "grader": profile.grader, "report": profile.report}


def lines(known: dict[str, Partition], profile: ClusterProfile | None, preempts: bool) -> list[Finding]:
    """Those that jobs would go to each have a line, and the others too where they are few."""
    if not known:
        return [problem("partitions", "none that you may see", "no job can be submitted", "ask the site")]
    ours = wanted(profile, known)
    names = ours if len(known) > MANY else list(known)
    found = [_line(known[name], name in ours, preempts) for name in names if name in known]
    found += [
        problem(f"partition {name}", "there is none", "sbatch refuses the jobs", f"choose one of: {', '.join(known)}")
        for name in ours
        if name not in known
    ]
    others = [name for name in known if name not in names]
    return [*found, ok("further partitions", ", ".join(others))] if others else found


def _line(partition: Partition, ours: bool, preempts: bool) -> Finding:
    name = f"partition {partition.name}"
    longest = span(partition.max_time_s) if partition.max_time_s is not None else "no limit"
    gpus = " + ".join(f"{count} {kind or 'of no type'}" for kind, count in partition.gpus.items())
    value = f"{'default, ' if partition.default else ''}longest job {longest}, "
    value += f"{partition.usable} of {partition.nodes} nodes usable, GPUs a node: {gpus or 'none'}"
    if not partition.up or (partition.nodes and not partition.usable):
        value += "; down" if not partition.up else ""
        judged = warning if ours else note
        return judged(name, value, "jobs wait until it is up again", "use another partition, or wait")
    if preempts and partition.preempt != "OFF":
        value += f"; preemption: {partition.preempt}, {partition.grace_s:.0f} s grace"
        gone = "CANCEL" in partition.preempt
        so_what = "its jobs make room for others, and go on " + ("once launched again" if gone else "later")
        return note(name, value, so_what, "let agents save often")
    return ok(name, value)


def gpu_names(known: dict[str, Partition], profile: ClusterProfile | None) -> Finding:
    """The types that Slurm knows, against what the profile asks for."""
    name = "GPUs as Slurm names them"
    places = [known[p] for p in wanted(profile, known) if p in known] or list(known.values())
    types: dict[str, int] = {}
    for place in places:
        for kind, count in place.gpus.items():
            types[kind] = max(types.get(kind, 0), count)
    value = ", ".join(f"gpu:{kind}:{count}" if kind else f"gpu:{count}" for kind, count in types.items()) or "none"
    if profile is None:
        return ok(name, value)
    if profile.gpu_wording == "none":
        if not types:
            return ok(name, value)
        so_what = "jobs see GPUs only where a node is theirs alone"
        return note(name, f"{value}; the profile asks for none", so_what, "`gpu_wording: gres` in the profile")
    asks = {(kind.gpu_type or profile.gpu_type or "", kind.gpus or 0) for kind in (profile.agent, profile.grader)}
    for asked, count in sorted(asks):
        most = types.get(asked, 0) if asked else max(types.values(), default=0)
        if most < count:
            wish = f"the profile asks for {count} {asked}".rstrip()
            advice = "set `gpu_type` and `gpus` to what is there; `gpu_wording: none` where Slurm doesn't count GPUs"
            return problem(name, value, f"{wish} on one node: sbatch refuses, or the job waits for ever", advice)
    slices = [kind for kind in types if re.search(r"\dg\.\d+gb|^mig", kind, re.IGNORECASE)]
    if any(count and not asked for asked, count in asks) and (slices or sum(map(bool, types)) > 1):
        so_what = "runs get whichever is free, and are comparable only on one kind"
        return note(name, f"{value}; the profile names none", so_what, "name one with `gpu_type` in the profile")
    return ok(name, value)


def dry(profile: ClusterProfile | None, known: dict[str, Partition] | None = None) -> list[Finding]:
    """`sbatch --test-only`: the scheduler judges the job, and nothing is submitted."""
    known = known or {}

    def up(partition: str | None) -> bool:
        names = [name for name in (partition or "").split(",") if name in known] or [
            p.name for p in known.values() if p.default
        ]
        return not names or any(known[name].usable for name in names)

    if profile is None:
        request = Request(None, JobKind(gpus=0, cpus=1), HOUR_MINUTES)
        return [_dry("a job of 1 CPU", request, nodes_up=up(habit("partition")))]
    found = []
    for name, kind in _kinds(profile).items():
        minutes = max(1, int(kind.time // 60)) if kind.time else HOUR_MINUTES
        partition = kind.partition or profile.partition or habit("partition")
        found.append(_dry(f"{name} job", Request(profile, kind, minutes), nodes_up=up(partition)))
    return found


def _dry(name: str, request: Request, *, nodes_up: bool) -> Finding:
    asked = request.describe()
    try:
        _, said = sbatch("#!/bin/sh\ntrue\n", ["--test-only", "--job-name=autorl-doctor-test", *request.options()])
    except slurm.SchedulerError as error:
        if "no answer within" in error.what:
            return unknown(name, error.what)
        told = f"--test-only says no: {error.what} ({asked})"
        if not nodes_up:  # it is asked about the nodes as they are; sbatch itself takes the job and lets it wait
            return warning(
                name, told, "no node of its partition is up: jobs would wait", "wait, or choose another partition"
            )
        return problem(name, told, "launch would be refused too", error.next_step or "")
    return ok(name, f"would be taken{_start(said)} ({asked})")


def _start(said: str, now: float | None = None) -> str:
    match = re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", said)
    if match is None:
        return ""
    at = time.mktime(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S"))
    wait = at - (time.time() if now is None else now)
    return ", at once" if wait < 60 else f", in {span(wait)} as things stand"


# What accounting allows a user and an account: jobs at once, GPUs at once, the longest job.

ASSOCIATION = ["Account", "User", "Partition", "QOS", "MaxJobs", "MaxSubmit", "MaxWall", "MaxTRES"]
ASSOCIATION += ["GrpJobs", "GrpSubmit", "GrpTRES", "GrpWall"]
QOS = ["Name", "MaxJobsPU", "MaxSubmitPU", "MaxWall", "MaxTRES", "MaxTRESPU", "GrpJobs", "GrpSubmit", "GrpTRES"]
FEW_SUBMITTED = 20
"""Each run is a task of an array and counts; graders, their chain and the report come on top."""

STEP = "`grader: {placement: step}` in the experiment: the grader runs in the agent's job"
Row = Mapping[str, str]


def rows(what: str, fields: Sequence[str], *conditions: str) -> list[dict[str, str]]:
    """`sacctmgr show`, one dictionary a line; lines of another form are passed over.

    Raises:
        SchedulerError: it doesn't answer.
        ValueError: it answers, and no line has the form.
    """
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", what, *conditions, f"format={','.join(fields)}"]
    lines = [line for line in slurm.run(argv, timeout_s=ASK_S).splitlines() if line.strip()]
    found = [dict(zip(fields, line.split("|"), strict=True)) for line in lines if line.count("|") == len(fields) - 1]
    if lines and not found:
        raise ValueError(lines[0][:100])
    return found


@dataclass(frozen=True)
class Need:
    """What one run needs at once, by the profile."""

    gpus: int = 0
    jobs: int = 2

    @classmethod
    def of(cls, profile: ClusterProfile | None) -> Need:
        if profile is None:
            return cls()
        return cls((profile.agent.gpus or 0) + (profile.grader.gpus or 0))


def check_limits(config: Mapping[str, str], profile: ClusterProfile | None) -> list[Finding]:
    """Of the user's associations, their accounts, and their QOS."""
    if config.get("AccountingStorageType", "").endswith("none"):
        return [ok("limits of accounts", "none: there is no accounting")]
    name = "limits of accounts"
    user, cluster = _user(), config.get("ClusterName", "")
    try:
        mine = rows("assoc", ASSOCIATION, f"user={user}", *([f"cluster={cluster}"] if cluster else []))
    except slurm.SchedulerError as error:
        return [unknown(name, error.what, "sbatch may refuse what launch asks for", "see your site's pages")]
    except ValueError as error:
        return [unknown(name, f"sacctmgr says: {error}", "sbatch may refuse what launch asks for", "look by hand")]
    enforced = config.get("AccountingStorageEnforce", "none")
    found = [_accounts(mine, profile, enforced)]
    need = Need.of(profile)
    for row in _with_accounts(mine, cluster):
        place = row["Account"] + (f", partition {row['Partition']}" if row.get("Partition") else "")
        found.append(
            judge(f"account {place}" if row.get("User") else f"account {place}, all users", row, need, enforced)
        )
    return [*found, *_qos(mine, profile, need, enforced)]


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return os.environ.get("USER", str(os.geteuid()))


def _wordings(profile: ClusterProfile | None) -> list[Wording]:
    return [profile, profile.agent, profile.grader, profile.report] if profile else []


def _accounts(mine: list[dict[str, str]], profile: ClusterProfile | None, enforced: str) -> Finding:
    names = sorted({row["Account"] for row in mine if row["Account"]})
    wanted = {kind.account for kind in _wordings(profile) if kind.account}
    value = ", ".join(names) or "none"
    strict = "associations" in enforced or "limits" in enforced or "safe" in enforced
    if wanted - set(names):
        value += f"; the profile says {', '.join(sorted(wanted))}"
        judged = problem if strict else warning
        return judged("your accounts", value, "sbatch refuses the jobs", "set `account` in the profile to one of yours")
    if not names and strict:
        return problem("your accounts", value, "sbatch refuses every job", "ask the site for an account")
    return ok("your accounts", value)


def _with_accounts(mine: list[dict[str, str]], cluster: str) -> list[dict[str, str]]:
    """The user's rows and, of each account, the row that counts for all of its users."""
    names = ",".join(sorted({row["Account"] for row in mine if row["Account"]}))
    if not names:
        return mine
    try:
        shared = rows("assoc", ASSOCIATION, f"account={names}", "user=", *([f"cluster={cluster}"] if cluster else []))
    except (slurm.SchedulerError, ValueError):
        return mine
    return [*mine, *(row for row in shared if not row["User"] and any(row[f] for f in ASSOCIATION if "Grp" in f))]


def _qos(mine: list[dict[str, str]], profile: ClusterProfile | None, need: Need, enforced: str) -> list[Finding]:
    names = {name for row in mine for name in row["QOS"].split(",") if name}
    wanted = {kind.qos for kind in _wordings(profile) if kind.qos}
    try:
        known = rows("qos", QOS)
    except (slurm.SchedulerError, ValueError) as error:
        words = error.what if isinstance(error, slurm.SchedulerError) else f"sacctmgr says: {error}"
        return [unknown("limits of QOS", words)]
    found = []
    for name in sorted(wanted - (names or {row["Name"] for row in known})):
        so_what = "sbatch refuses the jobs where QOS is enforced"
        found.append(warning(f"qos {name}", "not one of yours", so_what, f"choose one of: {', '.join(sorted(names))}"))
    shown = wanted & names or names
    return found + [judge(f"qos {row['Name']}", row, need, enforced) for row in known if row["Name"] in shown]


WORDS = {
    "MaxJobs": "jobs at once",
    "MaxJobsPU": "jobs at once",
    "GrpJobs": "jobs at once of all",
    "MaxSubmit": "jobs submitted",
    "MaxSubmitPU": "jobs submitted",
    "GrpSubmit": "jobs submitted of all",
    "MaxWall": "a job",
    "GrpWall": "in all",
    "MaxTRES": "a job",
    "MaxTRESPU": "a user",
    "GrpTRES": "of all",
}


def judge(name: str, row: Row, need: Need, enforced: str) -> Finding:
    """One association's or QOS's limits against what one run needs."""
    told = [f"{row[field]} {words}" for field, words in WORDS.items() if row.get(field)]
    if not told:
        return ok(name, "no limits")
    value = "; ".join(told)
    if not ({"limits", "safe", "qos", "all"} & set(re.split(r"[,|]", enforced))):
        return ok(name, f"{value} (told, not enforced: {enforced})")
    gpus = min(
        (count for field in ("GrpTRES", "MaxTRESPU") if (count := _gpus(row.get(field))) is not None), default=None
    )
    jobs = _least(row, "MaxJobs", "MaxJobsPU", "GrpJobs")
    submits = _least(row, "MaxSubmit", "MaxSubmitPU", "GrpSubmit")
    if gpus is not None and gpus < need.gpus:
        so_what = f"an agent and its grader want {need.gpus} GPUs at once: one waits until the other ends"
        return warning(name, value, so_what, STEP)
    if jobs is not None and jobs < need.jobs:
        return warning(name, value, "an agent and its grader can't run at once: scores come after the end", STEP)
    if submits is not None and submits < FEW_SUBMITTED:
        so_what = "each run counts, and 5 jobs more an experiment; sbatch refuses what is above"
        return warning(name, value, so_what, "launch smaller experiments one after the other")
    return note(name, value, "runs wait in the queue above these, and sbatch refuses what is longer or more", "")


def _gpus(tres: str | None) -> int | None:
    match = re.search(r"gres/gpu(?::[^=,]+)?=(\d+)", tres or "")
    return int(match[1]) if match else None


def _least(row: Row, *fields: str) -> int | None:
    return min((int(row[field]) for field in fields if row.get(field, "").isdigit()), default=None)
