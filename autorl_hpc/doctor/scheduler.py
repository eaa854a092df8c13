"""Check what Slurm says: clients, configuration, limits of accounts, partitions, and whether it would take the profile's jobs."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.profile import gpu_options, habit, module_lines, python_command
from autorl_hpc.cluster.slurm import duration_s
from autorl_hpc.doctor.finding import Finding, note, ok, problem, span, unknown, warning
from autorl_hpc.files.layout import PACKAGE
from autorl_hpc.records.cluster import ClusterProfile, JobKind

Config = Mapping[str, str]  # `scontrol show config`: names and values as Slurm prints them
UNNAMED = ClusterProfile.model_validate(
    {"name": "unnamed", **{kind: {"gpus": 0, "cpus": 1} for kind in ("agent", "grader", "report")}}
)
"""Stands for no profile: the default partition, without GPUs."""

ASK_S = 15.0
SLOW_S = 5.0  # the watcher asks every half minute
LITTLE_MEMORY_MIB = 4096
CLIENTS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")


def clients() -> Finding:
    missing = [name for name in CLIENTS if shutil.which(name) is None]
    if not missing:
        return ok("clients", "all here")
    if len(missing) == len(CLIENTS):
        so_what = "jobs can't be submitted from here; everything can run on this machine alone"
        return note("clients", "none on this host", so_what, "work on a login node, or use `cluster: local`")
    words = f"missing: {', '.join(missing)}"
    return problem("clients", words, "launch and its watcher call them", "add Slurm's bin folder to PATH")


def answered(config: Config, took_s: float) -> Finding:
    value = f"{config.get('ClusterName', 'no name')} answers in {span(took_s)}"
    if took_s > SLOW_S:
        return warning("controller", value, "a busy scheduler: what became of jobs is known late", "launch fewer jobs")
    return ok("controller", value)


def check_configuration(config: Config, profile: ClusterProfile) -> list[Finding]:
    size = _max_array_size(config, profile.limits.max_array_size)
    return [_accounting(config), size, _memory_default(config, profile)]


def _accounting(config: Config) -> Finding:
    """Ask sacct, which knows what became of jobs that squeue has forgotten."""
    storage = config.get("AccountingStorageType", "not told").removeprefix("accounting_storage/")
    age = config.get("MinJobAge", "MinJobAge")
    lost = f"how a job ended is known for {age} after its end, then only from what it wrote itself"
    began = time.monotonic()
    try:
        slurm.run(["sacct", "--noheader", "--allocations", "--parsable2", "--starttime=now-1hour"], timeout_s=ASK_S)
    except slurm.SchedulerError as error:
        if storage in ("none", "(null)"):
            return note("accounting", f"{storage}: sacct knows nothing", lost, "nothing: the suite does without")
        return warning("accounting", f"{storage}; {error.what}", lost, "tell the site's people, if it stays so")
    return ok("accounting", f"{storage}, sacct answers in {span(time.monotonic() - began)}")


def _max_array_size(config: Config, own: int | None) -> Finding:
    text, name = config.get("MaxArraySize", ""), "MaxArraySize"
    if not text.isdigit():
        return unknown(name, text or "not told", "arrays are kept below 1001 then")
    if own and own > int(text):
        so_what, value = "sbatch refuses an array that is larger", f"{text}, and the profile says {own}"
        return problem(name, value, so_what, f"`limits: {{max_array_size: {text}}}` in the profile, or none")
    if int(text) <= 1:
        return problem(name, f"{text}: arrays are off", "agents are submitted as arrays", "ask the site")
    return ok(name, f"{text}; larger experiments are split")


def _memory_default(config: Config, profile: ClusterProfile) -> Finding:
    label, advice = "memory of jobs", "`memory: 64G` under agent and grader in the profile"
    if profile.agent.memory and profile.grader.memory:
        return ok(label, "the profile names it")
    name = next((n for n in ("DefMemPerGPU", "DefMemPerCPU", "DefMemPerNode") if config.get(n, "").isdigit()), None)
    if name is None:
        so_what = "a job that names no memory may take a whole node's, and wait for a whole node"
        return note(label, "no default", so_what, advice)
    each = int(config[name])
    value = f"{each} MB per {name.removeprefix('DefMemPer')} for a job that names none"
    whole = each * (profile.agent.cpus or 1) if name == "DefMemPerCPU" else each
    if name != "DefMemPerGPU" and whole < LITTLE_MEMORY_MIB:
        so_what = "an import of torch takes some GB: such jobs end OUT_OF_MEMORY, or FAILED"
        return warning(label, value, so_what, advice)
    return ok(label, value)


# What the doctor's own jobs ask for and run, worded as the profile words real ones

SHORT_MINUTES = 8  # of a probe's job: what a pair may take at most, with a wait for its partner
OURS = {"job-name", "output", "error", "time", "array", "dependency", "comment", "signal", "mail-type", "mail-user"}
OURS |= {"parsable", "test-only", "wait", "requeue", "no-requeue", "hold", "begin", "open-mode", "chdir", "wrap"}
"""Options of a profile that a probe sets itself, or that would change what it is."""


@dataclass(frozen=True)
class Request:
    """What a job asks for; `kind` is one of the profile's jobs, with its GPUs, CPUs and memory."""

    profile: ClusterProfile
    kind: JobKind
    minutes: int = SHORT_MINUTES
    exclude: str | None = None

    def options(self) -> list[str]:
        """Return the options for sbatch, without name and output."""
        profile, kind = self.profile, self.kind
        named: dict[str, object] = {
            **{option: self._value(option) for option in ("partition", "account", "qos", "constraint", "reservation")},
            **{"cpus-per-task": kind.cpus, "mem": kind.memory, "exclude": self.exclude},
            **gpu_options(profile, kind),
        }
        given = {**profile.sbatch, **kind.sbatch}
        named |= {name: value for name, value in given.items() if name not in OURS}
        options = [f"--{name}" if value is True else f"--{name}={value}" for name, value in named.items() if value]
        return [f"--time={self.minutes}", "--no-requeue", "--open-mode=append", *options]

    def _value(self, option: str) -> str | None:
        return getattr(self.kind, option) or getattr(self.profile, option) or habit(option)

    def describe(self) -> str:
        """Return words such as `1 GPU, 1 CPU, 8 min in gpu`."""
        counts = [(self.kind.gpus, "GPU"), (self.kind.cpus, "CPU")]
        parts = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count]
        return ", ".join([*parts, f"{self.minutes} min"]) + f" in {self._value('partition') or 'the default partition'}"


def script(profile: ClusterProfile, folder: Path, side: str, gpus: int, folders: Sequence[Path]) -> str:
    """Return the job of one side: a real job's modules, setup and Python, then the pair beside what the node shows."""
    place, code = shlex.quote(str(folder)), shlex.quote(str(PACKAGE.parent))
    if profile.container is None and (profile.modules or profile.setup):
        code += "${PYTHONPATH:+:$PYTHONPATH}"
    seen = [str(folder.parent), *map(str, folders)]
    python = python_command(profile, seen)
    lines = [
        *("#!/bin/bash", *module_lines(profile), *profile.setup, f"cd {place} || exit", f"echo >started-{side}"),
        f"export PYTHONPATH={code} PYTHONDONTWRITEBYTECODE=1",
        f"{python} -m autorl_hpc.doctor.host {place}/node-{side}.json {gpus} {shlex.join(seen)} >node-{side}.log 2>&1 &",
        *(f"{python} pair.py {place} {side}", "wait", ""),
    ]
    return "\n".join(lines)


# Partitions, their GPUs, and whether the profile's jobs would be taken

HOUR_MINUTES = 60


@dataclass
class Partition:
    """One partition, as scontrol and sinfo tell it."""

    name: str
    default: bool
    up: bool
    max_time_s: float | None
    usable: int = 0
    nodes: int = 0
    gpus: dict[str, int] = field(default_factory=dict)  # by type (`` where there is none): the most that one node has


def read(scontrol: str, sinfo: str) -> dict[str, Partition]:
    """Parse `scontrol --oneliner show partition` and `sinfo --format=%R|%F|%G`."""
    found: dict[str, Partition] = {}
    for words in map(slurm.key_values, scontrol.splitlines()):
        if name := words.get("PartitionName"):
            default, up = words.get("Default") == "YES", words.get("State", "UP") == "UP"
            found[name] = Partition(name, default, up, duration_s(words.get("MaxTime", "")))
    for name, numbers, told in (row.split("|", 2) for row in sinfo.splitlines() if row.count("|") >= 2):
        if (partition := found.get(name)) is None:
            continue
        if counts := re.fullmatch(r"(\d+)/(\d+)/\d+/(\d+)", numbers):  # allocated/idle/other/total
            partition.usable += int(counts[1]) + int(counts[2])
            partition.nodes += int(counts[3])
        partition.gpus |= {kind: max(partition.gpus.get(kind, 0), count) for kind, count in gres(told).items()}
    return found


def gres(text: str) -> dict[str, int]:
    """Count the GPUs of one node by type: `gpu:a100:4(S:0-1),gpu:2,lscratch:1` gives {a100: 4, '': 2}."""
    found: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        match = re.fullmatch(r"gpu(?::([^:=]+(?=:)))?[:=](\d+)[KM]?|gpu:([^:=\d][^:=]*)|gpu", item.strip())
        if match:
            kind = match[1] or match[3] or ""
            found[kind] = found.get(kind, 0) + int(match[2] or 1)
    return found


def check_partitions(config: Config, profile: ClusterProfile) -> list[Finding]:
    try:
        known = read(
            slurm.run(["scontrol", "--oneliner", "show", "partition"], timeout_s=ASK_S),
            slurm.run(["sinfo", "--noheader", "--format=%R|%F|%G"], timeout_s=ASK_S),
        )
    except slurm.SchedulerError as error:
        return [unknown("partitions", error.what)]
    return [*lines(known, profile), gpu_names(known, profile), *dry(profile)]


def wanted(profile: ClusterProfile, known: dict[str, Partition]) -> list[str]:
    """Return the names of the partitions that jobs would go to."""
    default = habit("partition") or next((p.name for p in known.values() if p.default), "")
    named = [kind.partition or profile.partition or default for kind in _kinds(profile)]
    return list(dict.fromkeys(part for name in named for part in name.split(",") if part))


def _kinds(profile: ClusterProfile) -> list[JobKind]:
    return [profile.agent, profile.grader, profile.report]


def lines(known: dict[str, Partition], profile: ClusterProfile) -> list[Finding]:
    """Judge each partition that jobs would go to."""
    if not known:
        return [problem("partitions", "none that you may see", "no job can be submitted", "ask the site")]
    found = []
    for name in wanted(profile, known):
        label, partition = f"partition {name}", known.get(name)
        if partition is None:  # sbatch says so below
            found.append(problem(label, "there is none", "sbatch refuses the jobs", f"one of: {', '.join(known)}"))
            continue
        longest = span(partition.max_time_s) if partition.max_time_s is not None else "no limit"
        gpus = " + ".join(f"{count} {kind or 'of no type'}" for kind, count in partition.gpus.items()) or "none"
        value = f"longest job {longest}, {partition.usable} of {partition.nodes} nodes usable, GPUs a node: {gpus}"
        if partition.up and (partition.usable or not partition.nodes):
            found.append(ok(label, value))
        else:
            value += "" if partition.up else "; down"
            so_what, advice = "jobs wait until it is up again", "use another partition, or wait"
            found.append(warning(label, value, so_what, advice))
    return found


def gpu_names(known: dict[str, Partition], profile: ClusterProfile) -> Finding:
    """Tell the types that Slurm knows; whether the profile's jobs can have theirs, sbatch says."""
    name, types = "GPUs as Slurm names them", dict[str, int]()
    for place in [known[p] for p in wanted(profile, known) if p in known] or known.values():
        types |= {kind: max(types.get(kind, 0), count) for kind, count in place.gpus.items()}
    value = ", ".join(f"gpu:{kind}:{count}" if kind else f"gpu:{count}" for kind, count in types.items()) or "none"
    if profile.gpu_wording == "none":
        so_what, told = "jobs see GPUs only where a node is theirs alone", f"{value}; the profile asks for none"
        return note(name, told, so_what, "`gpu_wording: gres` in the profile") if types else ok(name, value)
    asks = {(kind.gpu_type or profile.gpu_type, kind.gpus) for kind in (profile.agent, profile.grader)}
    if len(types) > 1 and any(count and not asked for asked, count in asks):
        so_what = "runs get whichever is free, and are comparable only on one kind"
        return note(name, f"{value}; the profile names none", so_what, "name one with `gpu_type` in the profile")
    return ok(name, value)


def dry(profile: ClusterProfile) -> list[Finding]:
    """Let `sbatch --test-only` judge each kind of job; nothing is submitted."""
    found = []
    for name, kind in zip(("agent job", "grader job", "report job"), _kinds(profile), strict=True):
        request = Request(profile, kind, max(1, int(kind.time // 60)) if kind.time else HOUR_MINUTES)
        asked = request.describe()
        try:
            options = ["--test-only", "--job-name=autorl-doctor-test", *request.options()]
            said = slurm.sbatch("#!/bin/sh\ntrue\n", options)
        except slurm.SchedulerError as error:
            told = f"--test-only says no: {error.what} ({asked})"
            found.append(problem(name, told, "launch would be refused too", error.next_step or ""))
            continue
        start = ""
        if match := re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", said):
            wait = time.mktime(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")) - time.time()
            start = ", at once" if wait < 60 else f", in {span(wait)} as things stand"
        found.append(ok(name, f"would be taken{start} ({asked})"))
    return found


# What accounting allows a user and an account: jobs at once, GPUs at once, the longest job

SHARED = ("MaxWall", "MaxTRES", "GrpJobs", "GrpSubmit", "GrpTRES")
ASSOCIATION = ("Account", "User", "Partition", "QOS", "MaxJobs", "MaxSubmit", *SHARED)
QOS = ("Name", "MaxJobsPU", "MaxSubmitPU", "MaxTRESPU", *SHARED)
FEW_SUBMITTED = 20  # each run is a task of an array and counts; graders, their chain and the report come on top
STEP = "`grader: {placement: step}` in the experiment: the grader runs in the agent's job"
Row = Mapping[str, str]


def rows(what: str, fields: Sequence[str], *conditions: str) -> Sequence[Row]:
    """Return the lines of `sacctmgr show`; those of another form are skipped. Raises SchedulerError if it doesn't answer."""
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", what, *conditions, f"format={','.join(fields)}"]
    parts = (line.split("|") for line in slurm.run(argv, timeout_s=ASK_S).splitlines())
    return [dict(zip(fields, row, strict=True)) for row in parts if len(row) == len(fields)]


def check_limits(config: Config, profile: ClusterProfile) -> list[Finding]:
    name = "limits of accounts"
    if config.get("AccountingStorageType", "").endswith("none"):
        return [ok(name, "none: there is no accounting")]
    here = [f"cluster={config['ClusterName']}"] if config.get("ClusterName") else []
    try:
        mine = rows("assoc", ASSOCIATION, f"user={pwd.getpwuid(os.geteuid()).pw_name}", *here)
        names = ",".join(sorted({row["Account"] for row in mine if row["Account"]}))
        shared = rows("assoc", ASSOCIATION, f"account={names}", "user=", *here) if names else []
        known = rows("qos", QOS)
    except slurm.SchedulerError as error:
        return [unknown(name, error.what, "sbatch may refuse what launch asks for", "see your site's pages")]
    enforced = config.get("AccountingStorageEnforce", "none")
    gpus = (profile.agent.gpus or 0) + (profile.grader.gpus or 0)
    found = [ok("your accounts", names or "none")]
    for row in [*mine, *(row for row in shared if not row["User"])]:
        place = row["Account"] + (f", partition {row['Partition']}" if row["Partition"] else "")
        found.append(judge(f"account {place}{'' if row['User'] else ', all users'}", row, gpus, enforced))
    own = {name for row in mine for name in row["QOS"].split(",") if name}
    shown = {value for each in (profile, *_kinds(profile)) if (value := each.qos)} & own or own
    return found + [judge(f"qos {row['Name']}", row, gpus, enforced) for row in known if row["Name"] in shown]


def judge(name: str, row: Row, gpus_needed: int, enforced: str) -> Finding:
    """Compare one association's or QOS's limits with what one run needs: its GPUs, and two jobs."""

    def least(*fields: str) -> float:
        return min((int(row[field]) for field in fields if row.get(field, "").isdigit()), default=float("inf"))

    value = ", ".join(f"{field} {row[field]}" for field in row if field.startswith(("Max", "Grp")) and row[field])
    if not value:
        return ok(name, "no limits")
    if not ({"limits", "safe", "qos", "all"} & set(re.split(r"[,|]", enforced))):
        return ok(name, f"{value} (told, not enforced: {enforced})")
    tres = re.findall(r"gres/gpu(?::[^=,]+)?=(\d+)", f"{row.get('GrpTRES')},{row.get('MaxTRESPU')}")
    if min(map(int, tres), default=gpus_needed) < gpus_needed:
        so_what = f"an agent and its grader want {gpus_needed} GPUs at once: one waits until the other ends"
        return warning(name, value, so_what, STEP)
    if least("MaxJobs", "MaxJobsPU", "GrpJobs") < 2:
        return warning(name, value, "an agent and its grader can't run at once: scores come after the end", STEP)
    if least("MaxSubmit", "MaxSubmitPU", "GrpSubmit") < FEW_SUBMITTED:
        so_what = "each run counts, and 5 jobs more an experiment; sbatch refuses what is above"
        return warning(name, value, so_what, "launch smaller experiments one after the other")
    return note(name, value, "runs wait in the queue above these, and sbatch refuses what is longer or more")
