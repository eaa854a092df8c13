"""The doctor on a host: findings, page and command; GPUs, file systems, quotas and sandboxes, in folders that play /proc."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import patients
import pytest
import warm
from helpers import PATIENCE_S
from patients import ROOT, Fake, by_name, proc, state
from rich.console import Console

from autorl_hpc.cluster.vllm_program import ProgramAnswer
from autorl_hpc.doctor import doctor, host, scheduler, storage, trial_jobs
from autorl_hpc.doctor.finding import Check, Finding, State, examine, in_group, ok, problem, warning

fake = patients.fake


# --- findings ---


def test_a_check_that_raises_or_hangs_is_a_finding() -> None:
    def raises() -> Finding:
        raise PermissionError(13, "no", "/proc/1")

    began = time.monotonic()
    found = examine(
        "g", Check("a", raises), Check("b", lambda: time.sleep(120) or [], 0.2), Check("c", lambda: ok("c", "1"))
    )
    assert time.monotonic() - began < 60
    assert [(f.group, f.check, f.state) for f in found] == [
        ("g", "a", State.UNKNOWN),
        ("g", "b", State.UNKNOWN),
        ("g", "c", State.OK),
    ]
    assert "PermissionError" in found[0].value and "no answer within" in found[1].value


# --- the page and the command ---


def call(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return warm.run(["-m", "autorl_hpc", "doctor", *arguments], {**os.environ, **env}, cwd, PATIENCE_S)


@pytest.mark.slow
def test_without_slurm_the_host_is_examined_and_slurm_is_one_note(tmp_path: Path, fake: Fake) -> None:
    fake(alone=True)
    root = tmp_path / "root"
    done = call("--json", "--root", str(root), cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["schema_version"] == 1
    of_slurm = [f for f in told["findings"] if f["group"] == "Slurm"]
    assert [(f["check"], f["state"]) for f in of_slurm] == [("clients", "note")]
    assert {"Files of the root", "Agents", "This host"} <= {f["group"] for f in told["findings"]}
    assert done.returncode == (1 if told["problems"] else 0)
    assert not root.exists() and list(tmp_path.glob(".autorl*")) == []


def test_the_page_begins_with_what_to_do_and_shows_no_escapes() -> None:
    """Terminal escapes of a program or a file, in any field; a problem below three screens of what is in order."""
    escape = "\x1b[31m\x9b\u202eX"
    found = in_group("g\x1b[2J", ok("a", "fine"), problem(escape, escape, escape, escape), warning("w", "v", "s", "d"))
    pages = []
    for every in (False, True):
        console = Console(file=io.StringIO(), width=100)
        doctor.show(found, console, every=every)
        pages.append(console.file.getvalue())  # type: ignore[attr-defined]
    short, whole = pages
    assert short.startswith("What to do\nproblem") and short.index("problem") < short.index("warning")
    assert "fine" not in short and "1 ok, 0 notes, 1 warning, 1 problem, 0 unknown" in short and "--all" in short
    assert "fine" in whole and whole.startswith(short.partition("\n\n")[0])
    assert not set("\x1b\x9b\u202e") & set(short + whole + json.dumps(doctor.as_json(found), ensure_ascii=False))


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


def test_a_job_that_never_starts_is_told_with_its_reason_and_taken_back(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lines in SLURM.items():
        folder = fake(name, lines)
    monkeypatch.setattr(trial_jobs, "FIRST_WAIT_S", 1.0)
    place = tmp_path / "root"
    place.mkdir()
    found = by_name(trial_jobs.examine_with_jobs(place, scheduler.UNNAMED, [], lambda line: None))
    waits = found["time from submit to run"]
    assert state(waits) == "warning" and "QOSMaxJobsPerUserLimit" in waits.value
    assert state(found["the pair"]) == "unknown"
    name = (folder / "scancel.calls").read_text().split()[0]
    assert name.startswith("--name=autorl-doctor-") and len(name) == len("--name=autorl-doctor-") + 8
    assert list(place.iterdir()) == []


# --- GPUs of a host ---


def test_a_job_whose_torch_sees_no_gpu_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """doctor found 0 problems where every training would have died."""
    said = "0 2.13.0+cpu None\n"
    monkeypatch.setattr(host, "ask", lambda *argv, limit_s: ProgramAnswer(0, said, ""))
    (found,) = host.torch_sees(1)
    assert state(found) == "problem" and "built without CUDA: it sees none of 1 GPU" in found.value
    assert "GPUs, by torch" in host.checks(1) and "GPUs, by torch" not in host.checks()


# --- where a folder lies ---


@pytest.mark.parametrize(
    ("line", "expected", "words"),
    [
        ("", "note", "ext4"),
        ("2 1 0:5 / {} rw shared:1 - tmpfs tmpfs rw", "warning", "in memory"),
        ("2 1 0:5 / {} rw - nfs4 server:/x rw,vers=4.2,local_lock=none", "note", "vers=4.2"),
        ("2 1 0:5 / {} rw - nfs4 server:/x rw,lookupcache=pos", "ok", "lookupcache"),
        ("2 1 0:5 / {} rw - lustre 10.0.0.1@tcp:/l rw,flock", "ok", "flock"),
        ("2 1 0:5 / {} rw,noexec - gpfs /dev/g rw", "warning", "noexec"),
        ("2 1 0:5 / {}/deeper rw - tmpfs tmpfs rw", "note", "ext4"),
    ],
)
def test_kind_of_file_system(tmp_path: Path, line: str, expected: str, words: str) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    found = storage.kind(folder, proc(tmp_path, ROOT, "torn line", line.format(str(folder).replace(" ", "\\040"))))
    assert state(found) == expected and words in found.value


# --- quota ---


QUOTA = "Disk quotas for user me (uid 1000):\n     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace\n"
LFS = "/lustre 20971520* 10485760 31457280 6d23h59m59s 1000 0 2000 -\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (QUOTA + "server:/home  1024  2048  4096  0  7  0  0  0\n", [("server:/home", 1048576, 2097152, 7, None)]),
        (QUOTA + "/dev/sda1  1024  2048  4096          7  10   20\n", [("/dev/sda1", 1048576, 2097152, 7, 10)]),
        (QUOTA + "/dev/sda1  9*  8  8  1700000000  7  0  0  0\n", [("/dev/sda1", 9216, 8192, 7, None)]),
        (LFS, [("/lustre", 20971520 * 1024, 10485760 * 1024, 1000, 2000)]),
        ("/a/very/long/name\n     9  0  0  -  7  0  0  -\n", [("/a/very/long/name", 9216, None, 7, None)]),
        ("quota: error while getting quota from server:/home\n", []),
    ],
)
def test_rows_of_quota(text: str, expected: list[Any]) -> None:
    assert [(q.place, q.used, q.limit, q.files, q.files_limit) for q in storage.parse_quota(text)] == expected


# --- this host ---


def test_offline_variables_are_told_and_nothing_is_contacted() -> None:
    found = by_name(host.offline({"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://user:word@proxy:1", "no_proxy": ""}))
    assert "HF_HUB_OFFLINE=1" in found["offline variables"].value
    assert state(found["proxies"]) == "note" and "https_proxy" in found["proxies"].value
    assert "word" not in str(found)


@pytest.mark.slow
def test_sandboxes_by_doing(fake: Fake) -> None:
    fake(alone=True)  # a PATH without bwrap
    found = by_name(host.check_sandbox())
    assert found["bwrap"].value == "no bwrap here" and state(found["apptainer"]) == "note"
    assert state(found["level of runs"]) in ("ok", "note")  # the kernel's own, where this machine's allows them
    fake("bwrap", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    fake("singularity", "exit 0")
    found = by_name(host.check_sandbox())
    assert "No permissions" in found["bwrap"].value and state(found["bwrap"]) == "note"
    assert state(found["apptainer"]) == "ok"
