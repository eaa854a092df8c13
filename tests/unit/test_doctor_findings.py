"""The doctor's findings: a check that fails is one, and what others say is read with care; its page and its command."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import patients
import pytest
from helpers import PATIENCE_S
from patients import Fake, by_name, profile, state

from autorl_hpc.cluster import slurm
from autorl_hpc.doctor import doctor, trial_jobs
from autorl_hpc.doctor.finding import (
    Check,
    Finding,
    State,
    clean,
    examine,
    from_json,
    note,
    ok,
    problem,
    size,
    span,
    unknown,
)
from autorl_hpc.errors import Exit

fake = patients.fake

REPO = Path(__file__).resolve().parents[2]


# --- findings ---


def test_a_check_that_raises_or_hangs_is_a_finding() -> None:
    def raises() -> Finding:
        raise PermissionError(13, "no", "/proc/1")

    began = time.monotonic()
    found = examine(
        "g", [Check("a", raises), Check("b", lambda: time.sleep(120) or [], 0.2), Check("c", lambda: ok("c", "1"))]
    )
    assert time.monotonic() - began < 60
    assert [(f.group, f.check, f.state) for f in found] == [
        ("g", "a", State.UNKNOWN),
        ("g", "b", State.UNKNOWN),
        ("g", "c", State.OK),
    ]
    assert "PermissionError" in found[0].value and "no answer within" in found[1].value


def test_what_others_say_cannot_steer_the_terminal() -> None:
    assert clean("a\x1b[31mb\x07\n c\u202e") == "a [31mb c"
    assert len(clean("x" * 10_000)) == 600
    assert "\x1b" not in problem("x", "\x1b]0;title\x07", "", "").value


@pytest.mark.parametrize("value", [None, 3, [], {}, {"check": "a"}, {"state": "fine", "check": "", "value": ""}])
def test_findings_of_another_process_are_read_with_care(value: Any) -> None:
    assert from_json(value) is None


def test_findings_survive_json() -> None:
    finding = note("a", "b", "c", "d")
    assert from_json(json.loads(json.dumps(finding.as_json()))) == finding


def test_units() -> None:
    assert [span(s) for s in (0.0123, 1.4, 90, 720, 86400, 260000)] == [
        "12 ms",
        "1.4 s",
        "90 s",
        "12 min",
        "24 h",
        "3.01 days",
    ]
    assert [size(b) for b in (5, 2048, 50 * 1024**3)] == ["5 B", "2.0 KiB", "50 GiB"]


# --- the page and the command ---


def test_the_page_keeps_to_80_columns() -> None:
    from rich.console import Console

    out = io.StringIO()
    long = "word " * 40 + "/a/path/that/has/no/place/to/break" * 4
    findings = [
        problem("a name that is longer than its column", long, long, long),
        ok("x", "[red]1[/red]"),
        unknown("y", ""),
    ]
    doctor.show(findings, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "[red]1[/red]" in out.getvalue()
    assert not any(line != line.rstrip() for line in lines)
    assert lines[-1] == "1 ok, 0 notes, 0 warnings, 1 problem, 1 unknown"


def test_exit_codes() -> None:
    good, bad, dark = ok("a", ""), problem("b", "", "", ""), unknown("c", "")
    assert doctor.exit_code([good, dark]) == Exit.OK
    assert doctor.exit_code([good, bad, dark]) == Exit.FAILED
    assert doctor.exit_code([dark]) == doctor.exit_code([]) == Exit.ENVIRONMENT


def call(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autorl_hpc", "doctor", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPO), **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.slow
def test_without_slurm_the_host_is_examined_and_slurm_is_one_note(tmp_path: Path, fake: Fake) -> None:
    fake(alone=True)
    root = tmp_path / "root"
    done = call("--json", "--root", str(root), cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["schema_version"] == 1
    of_slurm = [f for f in told["findings"] if f["group"] == "Slurm"]
    assert [(f["check"], f["state"]) for f in of_slurm] == [("clients", "note")]
    assert {"Files of the root", "Temporary folders", "This host"} <= {f["group"] for f in told["findings"]}
    assert done.returncode == (1 if told["problems"] else 0)
    assert not root.exists() and list(tmp_path.glob(".autorl*")) == []


def test_a_profile_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    assert call("--cluster", "nowhere", cwd=tmp_path).returncode == 2


SLURM = {
    "scontrol": "case \"$*\" in *config*) echo 'MaxArraySize = 1001'; echo 'ClusterName = c' ;; "
    "*partition*) echo 'PartitionName=p Default=YES MaxTime=60 State=UP' ;; esac",
    "sinfo": "echo 'p|0/1/0/1|(null)'",
    "sacct": "exit 1",
    "sacctmgr": "exit 1",
    "squeue": 'test -e "$0.name" || exit 0\n'
    'printf \'7\\037%s\\037PENDING\\037QOSMaxJobsPerUserLimit\\037\\037\\0372001\\n\' "$(cat "$0.name")"',
    "sbatch": 'cat >/dev/null; case "$*" in *test-only*) exit 0 ;; esac; echo called >>"$0.calls"\n'
    'for word; do case $word in --job-name=*) echo "${word#*=}" >"${0%sbatch}squeue.name" ;; esac; done; echo 7',
    "scancel": 'echo "$*" >>"$0.calls"; rm "${0%scancel}squeue.name"',
}


@pytest.mark.slow
def test_no_jobs_submits_none(tmp_path: Path, fake: Fake) -> None:
    fake(alone=True)
    for name, lines in SLURM.items():
        folder = fake(name, lines)
    done = call("--no-jobs", "--json", cwd=tmp_path)
    found = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert found["time from submit to run"]["state"] == "unknown"
    assert found["a job of 1 CPU"]["state"] == "ok"
    assert not (folder / "sbatch.calls").exists()


def test_a_job_that_never_starts_is_told_with_its_reason_and_taken_back(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lines in SLURM.items():
        folder = fake(name, lines)
    monkeypatch.setattr(trial_jobs, "FIRST_WAIT_S", 1.0)
    place = tmp_path / "root"
    place.mkdir()
    found = by_name(trial_jobs.examine_with_jobs(place, None, [], lambda line: None))
    waits = found["time from submit to run"]
    assert state(waits) == "warning" and "QOSMaxJobsPerUserLimit" in waits.value
    assert state(found["the pair"]) == "unknown"
    name = (folder / "scancel.calls").read_text().split()[0]
    assert name.startswith("--name=autorl-doctor-") and len(name) == len("--name=autorl-doctor-") + 8
    assert list(place.iterdir()) == []


def test_a_refusal_of_sbatch_is_a_problem_in_its_words(tmp_path: Path, fake: Fake) -> None:
    for name, lines in SLURM.items():
        fake(name, lines)
    fake("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1")
    found = by_name(trial_jobs.examine_with_jobs(tmp_path, profile(qos="x"), [], lambda line: None))
    refused = found["time from submit to run"]
    assert state(refused) == "problem" and "Invalid qos" in refused.value and "qos" in refused.do_this


@pytest.mark.slow
def test_a_scheduler_that_is_down(tmp_path: Path, fake: Fake) -> None:
    for name in SLURM:
        fake(name, "echo 'slurm_load_ctl_conf error: Unable to contact slurm controller' >&2; exit 1")
    done = call("--json", cwd=tmp_path)
    found = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1 and found["controller"]["state"] == "problem"
    assert "time from submit to run" not in found
    with pytest.raises(slurm.SchedulerError):
        slurm.run(["scontrol"])
