"""Partitions, their GPUs, and whether the profile's jobs would be taken, by the scheduler's own mouth."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from autorl_hpc.cluster import commands
from autorl_hpc.cluster.look import duration_s
from autorl_hpc.cluster.site import habit
from autorl_hpc.doctor.finding import Finding, note, ok, problem, unknown, warning
from autorl_hpc.doctor.submission import Request, sbatch
from autorl_hpc.doctor.tools import span
from autorl_hpc.records.cluster import ClusterProfile, JobKind

ASK_S = 15.0
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


def everything(config: dict[str, str], profile: ClusterProfile | None) -> list[Finding]:
    """Partitions, GPUs as they are named, and a dry submission of each kind of job."""
    try:
        known = read(
            commands.run(["scontrol", "--oneliner", "show", "partition"], timeout_s=ASK_S),
            commands.run(["sinfo", "--noheader", "--format=%R|%F|%G"], timeout_s=ASK_S),
        )
    except commands.SchedulerError as error:
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
    except commands.SchedulerError as error:
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
