"""Each check of the doctor on made-up inputs. The edges are small programs put first in PATH, and folders that play /proc."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S

from autorl_hpc.cluster import commands
from autorl_hpc.doctor import (
    api,
    filesystem,
    gpus,
    host,
    limits,
    page,
    pairing,
    partitions,
    quota,
    sandbox,
    slurm,
    storage,
    visibility,
)
from autorl_hpc.doctor.finding import Check, Finding, State, clean, examine, from_json, note, ok, problem, unknown
from autorl_hpc.doctor.submission import Request, script
from autorl_hpc.doctor.tools import Answer, size, span
from autorl_hpc.errors import Exit
from autorl_hpc.records.cluster import ClusterProfile

REPO = Path(__file__).resolve().parents[2]
Fake = Callable[..., Path]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts a program of the test's own first in PATH; with `alone`, nothing but such programs and /bin/sh is found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(name: str = "", lines: str = "", *, alone: bool = False) -> Path:
        if alone:
            monkeypatch.setenv("PATH", str(folder))
        if name:
            (folder / name).write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{lines}\n")
            (folder / name).chmod(0o755)
        return folder

    return put


def profile(**fields: Any) -> ClusterProfile:
    return ClusterProfile.model_validate({"name": "mine", **fields})


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


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


# --- Slurm's configuration ---

CONFIG = {
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "JobRequeue": "1",
    "KillWait": "30 sec",
    "MaxArraySize": "1001",
    "MinJobAge": "300 sec",
    "PreemptType": "preempt/none",
    "SLURM_VERSION": "23.11.4",
    "DefMemPerNode": "UNLIMITED",
}


def state(finding: Finding) -> str:
    return str(finding.state)


def test_accounting(fake: Fake) -> None:
    fake("sacct", "exit 0")
    assert state(slurm.accounting(CONFIG)) == "ok"
    fake("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    none = slurm.accounting({**CONFIG, "AccountingStorageType": "accounting_storage/none"})
    assert state(none) == "note" and "300 sec" in none.so_what
    broken = slurm.accounting(CONFIG)
    assert state(broken) == "warning" and "disabled" in broken.value
    assert state(slurm.accounting({})) == "warning"


@pytest.mark.parametrize(
    ("look", "change", "expected"),
    [
        (slurm.min_job_age, {"MinJobAge": "2 sec"}, "note"),
        (slurm.min_job_age, {"MinJobAge": "0 sec"}, "ok"),
        (slurm.min_job_age, {"MinJobAge": "soon"}, "unknown"),
        (slurm.kill_wait, {"KillWait": "5 sec"}, "note"),
        (slurm.kill_wait, {"KillWait": ""}, "unknown"),
        (slurm.version, {"SLURM_VERSION": "19.05.2"}, "warning"),
        (slurm.version, {"SLURM_VERSION": "?"}, "unknown"),
        (slurm.version, {}, "ok"),
        (slurm.preemption, {}, "ok"),
        (slurm.preemption, {"PreemptType": "preempt/qos", "PreemptMode": "CANCEL"}, "note"),
    ],
)
def test_values_of_the_configuration(look: Callable[[Any], Finding], change: dict[str, str], expected: str) -> None:
    assert state(look({**CONFIG, **change})) == expected


@pytest.mark.parametrize(
    ("text", "own", "expected"),
    [("1001", None, "ok"), ("10", 20, "problem"), ("10", 5, "ok"), ("0", None, "problem"), ("many", None, "unknown")],
)
def test_array_size(text: str, own: int | None, expected: str) -> None:
    wanted = profile(limits={"max_array_size": own}) if own else profile()
    assert state(slurm.max_array_size({"MaxArraySize": text}, wanted)) == expected


def test_memory_of_jobs() -> None:
    assert state(slurm.memory_default(CONFIG, None)) == "note"
    assert state(slurm.memory_default({"DefMemPerCPU": "256"}, profile())) == "warning"
    assert state(slurm.memory_default({"DefMemPerCPU": "256"}, profile(agent={"cpus": 16}))) == "ok"
    named = profile(agent={"memory": "64G"}, grader={"memory": "32G"})
    assert state(slurm.memory_default({"DefMemPerCPU": "256"}, named)) == "ok"


def test_clients_missing_in_part_or_at_all(fake: Fake) -> None:
    fake(alone=True)
    assert state(slurm.clients()) == "note"
    fake("sbatch")
    assert state(slurm.clients()) == "problem"


# --- limits ---

ROW = dict.fromkeys([*limits.ASSOCIATION, *limits.QOS], "")


@pytest.mark.parametrize(
    ("row", "enforced", "expected"),
    [
        ({}, "limits", "ok"),
        ({"GrpTRES": "cpu=64,gres/gpu=1"}, "associations,limits", "warning"),
        ({"MaxTRESPU": "gres/gpu:a100=1"}, "limits,qos", "warning"),
        ({"GrpTRES": "gres/gpu=1"}, "none", "ok"),
        ({"GrpTRES": "gres/gpu=8"}, "limits", "note"),
        ({"MaxJobs": "1"}, "limits", "warning"),
        ({"MaxSubmit": "5"}, "safe", "warning"),
        ({"MaxSubmit": "-"}, "limits", "note"),
        ({"MaxWall": "1-00:00:00"}, "limits", "note"),
    ],
)
def test_a_limit_against_what_one_run_needs(row: dict[str, str], enforced: str, expected: str) -> None:
    assert state(limits.judge("x", {**ROW, **row}, limits.Need(gpus=2), enforced)) == expected


def test_limits_of_a_user_and_of_the_account(fake: Fake) -> None:
    fake(
        "sacctmgr",
        """case "$*" in
        *qos*) echo 'normal|||||||gres/gpu=4|'; echo 'normal||||||||'; echo 'torn|line' ;;
        *user=\\ *) echo 'lab||||||||||gres/gpu=1|'; echo 'lab|somebody||||||||||' ;;
        *) echo 'lab|me||normal||500|||||||'; echo 'lab|me||normal||500||||||' ;;
        esac""",
    )
    config = {**CONFIG, "AccountingStorageEnforce": "associations,limits", "ClusterName": "c"}
    found = by_name(limits.everything(config, profile(account="other")))
    assert state(found["your accounts"]) == "problem" and "lab; the profile says other" in found["your accounts"].value
    assert "500 jobs submitted" in found["account lab"].value
    assert state(found["account lab, all users"]) == "warning"
    assert "step" in found["account lab, all users"].do_this
    assert state(found["qos normal"]) == "ok"


@pytest.mark.parametrize("lines", ["echo '<html>404</html>'", "printf '\\377\\376\\n'", "exit 1", "kill -9 $$"])
def test_garbage_from_sacctmgr(fake: Fake, lines: str) -> None:
    fake("sacctmgr", lines)
    assert [state(f) for f in limits.everything(CONFIG, profile())] == ["unknown"]


def test_no_accounting_no_limits(fake: Fake) -> None:
    fake("sacctmgr", "exit 9")
    assert state(limits.everything({"AccountingStorageType": "accounting_storage/none"}, None)[0]) == "ok"


# --- partitions and GPUs by name ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(null)", {}),
        ("gpu:4", {"": 4}),
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:a100:4(S:0-1),gpu:v100:2(S:0,3),lscratch:1", {"a100": 4, "v100": 2}),
        ("gpu:1g.10gb:7,mps:100", {"1g.10gb": 7}),
        ("gpu", {"": 1}),
        ("gpu:h100", {"h100": 1}),
        ("shard:gpu:4,,", {}),
    ],
)
def test_gres_of_a_node(text: str, expected: dict[str, int]) -> None:
    assert partitions.gres(text) == expected


SCONTROL = """PartitionName=gpu Default=YES GraceTime=0 MaxTime=1-00:00:00 PreemptMode=OFF State=UP
PartitionName=old Default=NO MaxTime=UNLIMITED PreemptMode=CANCEL GraceTime=60 State=DOWN
PartitionName=cpu MaxTime=30 State=UP
nonsense
"""
SINFO = "gpu|2/1/1/4|gpu:a100:4(S:0-1)\ngpu|0/1/0/1|gpu:1g.10gb:7\ncpu|0/0/2/2|(null)\nold|x/y|gpu:2\ntorn\n"


def test_partitions_as_told() -> None:
    known = partitions.read(SCONTROL, SINFO)
    gpu, old, cpu = known["gpu"], known["old"], known["cpu"]
    assert (gpu.usable, gpu.nodes, gpu.gpus, gpu.max_time_s) == (4, 5, {"a100": 4, "1g.10gb": 7}, 86400)
    assert (old.up, old.max_time_s, old.grace_s) == (False, None, 60)
    lines = by_name(partitions.lines(known, profile(report={"partition": "cpu"}), preempts=True))
    assert state(lines["partition gpu"]) == "ok"
    assert state(lines["partition cpu"]) == "warning" and "0 of 2 nodes" in lines["partition cpu"].value
    assert state(lines["partition old"]) == "note"
    assert state(by_name(partitions.lines(known, profile(partition="gpux"), True))["partition gpux"]) == "problem"
    assert state(partitions.lines({}, None, True)[0]) == "problem"
    assert cpu.max_time_s == 1800


def test_many_partitions_take_one_line() -> None:
    many = {f"p{i}": partitions.Partition(f"p{i}", default=i == 0) for i in range(40)}
    assert [f.check for f in partitions.lines(many, None, False)] == ["partition p0", "further partitions"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"partition": "gpu", "gpu_type": "a100"}, "ok"),
        ({"partition": "gpu"}, "note"),  # two kinds, none named
        ({"partition": "gpu", "gpu_type": "h100"}, "problem"),
        ({"partition": "gpu", "gpu_type": "a100", "agent": {"gpus": 8}}, "problem"),
        ({"partition": "cpu"}, "problem"),
        ({"partition": "gpu", "gpu_wording": "none"}, "note"),
        ({"partition": "cpu", "gpu_wording": "none"}, "ok"),
    ],
)
def test_gpus_asked_for_and_there(fields: dict[str, Any], expected: str) -> None:
    assert state(partitions.gpu_names(partitions.read(SCONTROL, SINFO), profile(**fields))) == expected


def test_a_dry_submission_in_the_schedulers_words(fake: Fake) -> None:
    fake("sbatch", 'cat >/dev/null; echo "sbatch: Job 7 to start at 2001-01-01T00:00:00 using $*" >&2')
    found = partitions.dry(profile(account="lab"))
    assert [state(f) for f in found] == ["ok"] * 3 and "at once" in found[0].value
    fake("sbatch", "echo 'sbatch: error: Invalid account or account/partition combination specified' >&2; exit 1")
    refused = partitions.dry(None)[0]
    assert state(refused) == "problem" and "account" in refused.do_this


def test_what_a_probe_asks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    wanted = profile(
        partition="gpu",
        gpu_type="a100",
        sbatch={"exclusive": True, "mail-type": "END", "hint": "x y", "nice": False},
        modules=["cuda/12 gcc", "x;rm"],
        python="$HOME/`id`/$(id)/python",
    )
    first = pairing.requests(wanted)[0]
    options = first.options()
    assert {"--partition=gpu", "--account=mine", "--gres=gpu:a100:1", "--exclusive", "--hint=x y"} <= set(options)
    assert not any(option.startswith(("--mail", "--nice")) for option in options)
    assert Request(profile(gpu_wording="gpus-per-node"), first.kind).options().count("--gpus-per-node=1") == 1
    text = script(wanted, tmp_path / "a b", "a", 1, [])
    assert "module load 'x;rm'" in text and "module load gcc" in text
    assert '"$HOME/\\`id\\`/\\$(id)/python"' in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


# --- GPUs of a host ---

MIG = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c)
  MIG 1g.5gb      Device  0: (UUID: MIG-1)
  MIG 1g.5gb      Device  1: (UUID: MIG-2)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852d)
"""


def test_cards(fake: Fake) -> None:
    fake(alone=True)
    assert state(gpus.cards()) == "ok"
    fake("nvidia-smi", f"cat <<'END'\n{MIG}END")
    found = gpus.cards()
    assert state(found) == "note" and "2 x NVIDIA A100-SXM4-40GB; MIG: 2 x 1g.5gb" in found.value
    fake("nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert state(gpus.cards()) == "unknown" and "mismatch" in gpus.cards().value
    assert state(gpus.read_cards(Answer(0, "garbage", ""))) == "unknown"
    assert state(gpus.read_cards(Answer(0, "", ""))) == "ok"


@pytest.mark.parametrize(
    ("value", "asked", "expected"),
    [
        (None, None, "ok"),
        (None, 0, "ok"),
        (None, 1, "warning"),
        ("0,1", 2, "ok"),
        ("0,1,2,3", 1, "warning"),
        ("", 1, "warning"),
        ("", None, "ok"),
        ("GPU-5c89852c", 1, "note"),
        ("MIG-1,MIG-2", 2, "note"),
        ("NoDevFiles", 1, "note"),
    ],
)
def test_visible_devices(value: str | None, asked: int | None, expected: str) -> None:
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert state(gpus.visible(env, asked)) == expected


# --- where a folder lies ---


def proc(tmp_path: Path, *lines: str) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "self" / "mountinfo").write_text("".join(f"{line}\n" for line in lines))
    return folder


ROOT = "1 0 8:1 / / rw,relatime - ext4 /dev/sda1 rw"


@pytest.mark.parametrize(
    ("line", "expected", "words"),
    [
        ("", "note", "ext4"),
        ("2 1 0:5 / {} rw shared:1 - tmpfs tmpfs rw", "warning", "in memory"),
        ("2 1 0:5 / {} rw - nfs4 server:/x rw,vers=4.2,local_lock=none", "note", "vers=4.2"),
        ("2 1 0:5 / {} rw - nfs4 server:/x rw,lookupcache=pos", "ok", "lookupcache"),
        ("2 1 0:5 / {} rw - lustre 10.0.0.1@tcp:/l rw,flock", "ok", "flock"),
        ("2 1 0:5 / {} rw,noexec - gpfs /dev/g rw", "warning", "noexec"),
        ("2 1 0:5 / {} rw - fuse.sshfs me@x: rw", "ok", "fuse.sshfs"),
        ("2 1 0:5 / {}/deeper rw - tmpfs tmpfs rw", "note", "ext4"),
    ],
)
def test_kind_of_file_system(tmp_path: Path, line: str, expected: str, words: str) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    found = storage.kind(folder, proc(tmp_path, ROOT, "torn line", line.format(str(folder).replace(" ", "\\040"))))
    assert state(found) == expected and words in found.value


def test_an_unreadable_proc(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert state(storage.kind(tmp_path, nowhere)) == "unknown"
    assert state(storage.temporary("/tmp", str(tmp_path), nowhere)) == "unknown"
    assert storage.mount_of(tmp_path, nowhere) is None
    assert state(examine("", [Check("others", lambda: host.others(nowhere))])[0]) == "unknown"
    assert state(examine("", [Check("memory", lambda: host.memory(nowhere))])[0]) == "unknown"


def test_temporary_folders(tmp_path: Path) -> None:
    fake_proc = proc(tmp_path, ROOT, f"2 1 0:5 / {tmp_path} rw - tmpfs tmpfs rw")
    found = storage.temporary("$TMPDIR", str(tmp_path), fake_proc)
    assert state(found) == "note" and "RAM disk" in found.value and "memory" in found.so_what
    assert state(storage.temporary("$TMPDIR", str(tmp_path / "gone"), fake_proc)) == "warning"
    assert state(storage.temporary("/dev/shm", str(tmp_path / "gone"), fake_proc)) == "note"
    assert state(storage.temporary("$TMPDIR", None, fake_proc)) == "ok"


# --- quota ---

QUOTA = "Disk quotas for user me (uid 1000):\n     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace\n"
LFS = "/lustre 20971520* 10485760 31457280 6d23h59m59s 1000 0 2000 -\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("Disk quotas for user me (uid 1000): none\n", []),
        (QUOTA + "server:/home  1024  2048  4096  0  7  0  0  0\n", [("server:/home", 1048576, 2097152, 7, None)]),
        (QUOTA + "/dev/sda1  1024  2048  4096          7  10   20\n", [("/dev/sda1", 1048576, 2097152, 7, 10)]),
        (QUOTA + "/dev/sda1  9*  8  8  1700000000  7  0  0  0\n", [("/dev/sda1", 9216, 8192, 7, None)]),
        (LFS, [("/lustre", 20971520 * 1024, 10485760 * 1024, 1000, 2000)]),
        ("/a/very/long/name\n     9  0  0  -  7  0  0  -\n", [("/a/very/long/name", 9216, None, 7, None)]),
        ("quota: error while getting quota from server:/home\n", []),
    ],
)
def test_rows_of_quota(text: str, expected: list[Any]) -> None:
    assert [(q.place, q.used, q.limit, q.files, q.files_limit) for q in quota.parse_quota(text)] == expected


@pytest.mark.parametrize(
    ("row", "states"),
    [
        ("server:/x 1024 0 0 0 7 0 0 0", ["ok", "ok"]),
        ("server:/x 1024 0 2048 0 7 0 0 0", ["warning", "ok"]),  # less than a few checkpoints is left
        ("server:/x 9000000000 0 9000000000 0 7 0 0 0", ["problem", "ok"]),
        ("server:/x 1024 0 9000000000 0 95 0 100 0", ["ok", "warning"]),
        ("server:/y 1024 0 2048 0 7 0 0 0", ["ok"]),  # of another file system: none here
    ],
)
def test_quota_judged(fake: Fake, tmp_path: Path, row: str, states: list[str]) -> None:
    fake("quota", f"echo '{QUOTA.splitlines()[1]}'; echo '{row}'; exit 1")
    fake_proc = proc(tmp_path, ROOT, f"2 1 0:5 / {tmp_path} rw - nfs server:/x rw")
    assert [state(f) for f in quota.quota(tmp_path, fake_proc)] == states


def test_no_quota_command_garbage_and_other_tools(fake: Fake, tmp_path: Path) -> None:
    fake(alone=True)
    nfs = proc(tmp_path, ROOT, f"2 1 0:5 / {tmp_path} rw - nfs server:/x rw")
    assert state(quota.quota(tmp_path, nfs)[0]) == "unknown"
    fake("quota", "echo '<?xml garbage'")
    assert state(quota.quota(tmp_path, nfs)[0]) == "unknown"
    fake("quota", "echo 'Disk quotas for user me (uid 1): none'")
    assert state(quota.quota(tmp_path, nfs)[0]) == "ok"
    lustre = proc(tmp_path / "l", ROOT, f"2 1 0:5 / {tmp_path} rw - lustre x@tcp:/l rw")
    assert "`lfs`" in quota.quota(tmp_path, lustre)[0].value
    fake("lfs", f"echo '{tmp_path} 5 0 0 - 1 0 0 -'")
    assert [state(f) for f in quota.quota(tmp_path, lustre)] == ["ok", "ok"]


# --- files, by doing ---


def test_probes_of_a_folder_and_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "PAIR_LIMIT_S", PATIENCE_S)
    found = by_name([*filesystem.probes(tmp_path), *filesystem.pair_here(tmp_path)])
    for name in ("rename over", "hard link", "O_EXCL", "permissions", "link, raced", "mkdir, raced", "flock", "lockf"):
        assert state(found[name]) == "ok", found[name]


def test_a_folder_that_is_gone_is_a_problem(tmp_path: Path) -> None:
    found = by_name(filesystem.probes(tmp_path / "gone"))
    assert state(found["hard link"]) == "problem"
    assert state(host.writable(tmp_path / "gone")) == "problem"


def test_space(tmp_path: Path) -> None:
    assert [f.check for f in storage.space(tmp_path)] == ["space", "files left"]


# --- what a pair's results mean ---


def raw() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two nodes, B's clock 100 s ahead, everything seen after 0.1 s."""
    ways = list(visibility.WAYS)
    race = {kind: ["won", "lost"] * 15 for kind in visibility.RACES}
    a = {
        "node": "n1",
        "boot": "1",
        "stopped": "",
        "rounds": [[0.0, 100.01, 100.02, 0.03]] * 8,
        "early": [],
        "acted": dict.fromkeys(ways, 10.0),
        "race": race,
        "holders": ["a", "b"] * 15,
        "held": {"flock": "granted", "lockf": "granted"},
    }
    b = {
        "node": "n2",
        "boot": "2",
        "stopped": "",
        "seen": dict.fromkeys(ways, 110.1),
        "race": {kind: ["lost", "won"] * 15 for kind in visibility.RACES},
        "tried": {"flock": "refused", "lockf": "refused"},
        "again": {"flock": "granted", "lockf": "granted"},
    }
    return a, b


def judged(a: Any, b: Any) -> dict[str, Finding]:
    return by_name(visibility.judge(a, b, two_nodes=True))


def test_a_good_pair_and_its_clocks() -> None:
    found = judged(*raw())
    clock = found.pop("clocks, node to node")
    assert state(clock) == "warning" and "+100.0 s, give or take 10 ms" in clock.value
    assert {state(f) for f in found.values()} == {"ok"}
    assert "100 ms" in found["new file, by listing"].value


def test_a_pair_with_lags() -> None:
    a, b = raw()
    b["seen"] = {**b["seen"], "looked_for": 139.5, "tried_to_open": None, "listed": 120.0, "renamed_over": None}
    found = judged(a, b)
    assert state(found["missed name, by exists()"]) == "note" and "30 s" in found["missed name, by exists()"].value
    assert state(found["missed name, by open()"]) == "note" and "not within" in found["missed name, by open()"].value
    assert state(found["new file, by listing"]) == "warning"
    assert state(found["renamed over, by open()"]) == "problem"


def test_a_node_that_was_held_up_and_looked_late_is_no_lag() -> None:
    a, b = raw()
    b["seen"] = dict.fromkeys(b["seen"], 125.0)
    b["missed"] = {"listed": 109.9, "looked_for": 110.5, "removed": 124.9}
    found = judged(a, b)
    assert state(found["new file, by listing"]) == "ok" and "15 s" in found["new file, by listing"].value
    assert state(found["missed name, by exists()"]) == "ok"
    assert state(found["removed, by exists()"]) == "note"


def test_a_race_with_two_winners() -> None:
    a, b = raw()
    a["race"] = {kind: ["won"] * 30 for kind in visibility.RACES}
    b["race"] = {kind: ["won"] + ["lost"] * 29 for kind in visibility.RACES}
    found = judged(a, b)
    assert [state(found[n]) for n in visibility.RACES.values()] == ["problem", "problem", "note"]
    assert "1 won by both" in found["link, raced"].value


def test_a_race_whose_winner_was_told_otherwise() -> None:
    a, b = raw()
    a["race"] = {**a["race"], "link": ["lost", *a["race"]["link"][1:]]}
    assert state(judged(a, b)["link, raced"]) == "note" and "reported as taken" in judged(a, b)["link, raced"].value
    a["holders"] = [""] * 30
    assert "to nobody" in judged(a, b)["link, raced"].value


def test_links_that_are_refused() -> None:
    a, b = raw()
    for side in (a, b):
        side["race"] = {**side["race"], "link": ["Operation not permitted"] * 30}
    assert state(judged(a, b)["link, raced"]) == "problem"


@pytest.mark.parametrize(
    ("held", "tried", "words"),
    [
        ("granted", "granted", "granted to both"),
        ("refused", "refused", "refused to everybody"),
        ("Function not implemented", "Function not implemented", "not there"),
        ("granted", "No locks available", "No locks available"),
    ],
)
def test_locks_that_do_not_lock(held: str, tried: str, words: str) -> None:
    a, b = raw()
    a["held"], b["tried"] = {"flock": held, "lockf": "granted"}, {"flock": tried, "lockf": "refused"}
    found = judged(a, b)
    assert state(found["flock"]) == "note" and words in found["flock"].value
    assert state(found["lockf"]) == "ok"


def test_pairs_that_came_to_nothing() -> None:
    a, b = raw()
    assert [state(f) for f in visibility.judge(a, None, two_nodes=True)] == ["unknown"]
    stopped = judged({"node": "n1", "stopped": "the other side did not start"}, {"node": "n2", "stopped": ""})
    assert state(stopped["the pair"]) == "problem"
    assert state(stopped["flock"]) == state(stopped["link, raced"]) == state(stopped["size, by stat()"]) == "unknown"
    b["boot"] = "1"
    assert state(judged(a, b)["the two nodes"]) == "note"


# --- this host ---


def test_processes_of_others(tmp_path: Path) -> None:
    fake_proc = proc(tmp_path, ROOT, "3 1 0:4 / /proc rw - proc proc rw,hidepid=invisible")
    assert state(host.others(fake_proc)) == "ok" and "hidepid=invisible" in host.others(fake_proc).value
    (fake_proc / "77").mkdir()
    (fake_proc / "77" / "cmdline").write_bytes(b"sleep\0")
    (fake_proc / "78").mkdir()  # ended meanwhile
    assert state(host.others(fake_proc, uid=os.geteuid() + 1)) == "note"
    assert state(host.others(fake_proc)) == "ok"


def test_control_groups(tmp_path: Path) -> None:
    assert state(host.control_groups(tmp_path)) == "note"
    (tmp_path / "memory").mkdir()
    assert host.control_groups(tmp_path).value == "version 1"
    (tmp_path / "cgroup.controllers").touch()
    assert host.control_groups(tmp_path).value == "version 2"


def test_offline_variables_are_told_and_nothing_is_contacted() -> None:
    found = by_name(host.offline({"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://user:word@proxy:1", "no_proxy": ""}))
    assert "HF_HUB_OFFLINE=1" in found["offline variables"].value
    assert state(found["proxies"]) == "note" and "https_proxy" in found["proxies"].value
    assert "word" not in str(found)


def test_sandboxes_by_doing(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(alone=True)  # a PATH without bwrap
    found = by_name(sandbox.everything())
    assert found["bwrap"].value == "no bwrap here" and state(found["apptainer"]) == "note"
    assert state(found["level of runs"]) in ("ok", "note")  # the kernel's own, where this machine's allows them
    fake("bwrap", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    fake("singularity", "echo 'singularity-ce version 4.1'")
    found = by_name(sandbox.everything())
    assert "No permissions" in found["bwrap"].value and state(found["bwrap"]) == "note"
    assert state(found["apptainer"]) == "ok" and "4.1" in found["apptainer"].value
    monkeypatch.setattr(sandbox, "LEVELS", ())
    found = by_name(sandbox.everything())
    assert found["level of runs"].value == "none" and "never rank" in found["level of runs"].so_what


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
    page.show(findings, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "[red]1[/red]" in out.getvalue()
    assert not any(line != line.rstrip() for line in lines)
    assert lines[-1] == "1 ok, 0 notes, 0 warnings, 1 problem, 1 unknown"


def test_exit_codes() -> None:
    good, bad, dark = ok("a", ""), problem("b", "", "", ""), unknown("c", "")
    assert api.exit_code([good, dark]) == Exit.OK
    assert api.exit_code([good, bad, dark]) == Exit.FAILED
    assert api.exit_code([dark]) == api.exit_code([]) == Exit.ENVIRONMENT


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
    monkeypatch.setattr(pairing, "FIRST_WAIT_S", 1.0)
    place = tmp_path / "root"
    place.mkdir()
    found = by_name(pairing.examine(place, None, [], lambda line: None))
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
    found = by_name(pairing.examine(tmp_path, profile(qos="x"), [], lambda line: None))
    refused = found["time from submit to run"]
    assert state(refused) == "problem" and "Invalid qos" in refused.value and "qos" in refused.do_this


def test_a_scheduler_that_is_down(tmp_path: Path, fake: Fake) -> None:
    for name in SLURM:
        fake(name, "echo 'slurm_load_ctl_conf error: Unable to contact slurm controller' >&2; exit 1")
    done = call("--json", cwd=tmp_path)
    found = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1 and found["controller"]["state"] == "problem"
    assert "time from submit to run" not in found
    with pytest.raises(commands.SchedulerError):
        commands.run(["scontrol"])
