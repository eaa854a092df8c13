"""What accounting allows a user and an account: jobs at once, GPUs at once, the longest job."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autorl_hpc.cluster import commands
from autorl_hpc.doctor.finding import Finding, note, ok, problem, unknown, warning
from autorl_hpc.records.cluster import ClusterProfile, Wording

ASK_S = 15.0
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
    lines = [line for line in commands.run(argv, timeout_s=ASK_S).splitlines() if line.strip()]
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


def everything(config: Mapping[str, str], profile: ClusterProfile | None) -> list[Finding]:
    """Of the user's associations, their accounts, and their QOS."""
    if config.get("AccountingStorageType", "").endswith("none"):
        return [ok("limits of accounts", "none: there is no accounting")]
    name = "limits of accounts"
    user, cluster = _user(), config.get("ClusterName", "")
    try:
        mine = rows("assoc", ASSOCIATION, f"user={user}", *([f"cluster={cluster}"] if cluster else []))
    except commands.SchedulerError as error:
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
    except (commands.SchedulerError, ValueError):
        return mine
    return [*mine, *(row for row in shared if not row["User"] and any(row[f] for f in ASSOCIATION if "Grp" in f))]


def _qos(mine: list[dict[str, str]], profile: ClusterProfile | None, need: Need, enforced: str) -> list[Finding]:
    names = {name for row in mine for name in row["QOS"].split(",") if name}
    wanted = {kind.qos for kind in _wordings(profile) if kind.qos}
    try:
        known = rows("qos", QOS)
    except (commands.SchedulerError, ValueError) as error:
        words = error.what if isinstance(error, commands.SchedulerError) else f"sacctmgr says: {error}"
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
