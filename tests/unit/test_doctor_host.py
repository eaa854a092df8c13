"""What the doctor says of a host: its GPUs, file systems, quotas and sandboxes, in folders that play /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import patients
import pytest
from helpers import PATIENCE_S
from patients import ROOT, Fake, by_name, proc, state

from autorl_hpc.cluster.vllm_program import ProgramAnswer
from autorl_hpc.doctor import host, storage
from autorl_hpc.doctor.finding import Check, examine

fake = patients.fake


# --- GPUs of a host ---


MIG = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c)
  MIG 1g.5gb      Device  0: (UUID: MIG-1)
  MIG 1g.5gb      Device  1: (UUID: MIG-2)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852d)
"""


def test_cards(fake: Fake) -> None:
    fake(alone=True)
    assert state(host.cards()) == "ok"
    fake("nvidia-smi", f"cat <<'END'\n{MIG}END")
    found = host.cards()
    assert state(found) == "note" and "2 x NVIDIA A100-SXM4-40GB; MIG: 2 x 1g.5gb" in found.value
    fake("nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert state(host.cards()) == "unknown" and "mismatch" in host.cards().value
    assert state(host.read_cards(ProgramAnswer(0, "garbage", ""))) == "unknown"
    assert state(host.read_cards(ProgramAnswer(0, "", ""))) == "ok"


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
    assert state(host.visible(env, asked)) == expected


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
    assert [(q.place, q.used, q.limit, q.files, q.files_limit) for q in storage.parse_quota(text)] == expected


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
    assert [state(f) for f in storage.quota(tmp_path, fake_proc)] == states


def test_no_quota_command_garbage_and_other_tools(fake: Fake, tmp_path: Path) -> None:
    fake(alone=True)
    nfs = proc(tmp_path, ROOT, f"2 1 0:5 / {tmp_path} rw - nfs server:/x rw")
    assert state(storage.quota(tmp_path, nfs)[0]) == "unknown"
    fake("quota", "echo '<?xml garbage'")
    assert state(storage.quota(tmp_path, nfs)[0]) == "unknown"
    fake("quota", "echo 'Disk quotas for user me (uid 1): none'")
    assert state(storage.quota(tmp_path, nfs)[0]) == "ok"
    lustre = proc(tmp_path / "l", ROOT, f"2 1 0:5 / {tmp_path} rw - lustre x@tcp:/l rw")
    assert "`lfs`" in storage.quota(tmp_path, lustre)[0].value
    fake("lfs", f"echo '{tmp_path} 5 0 0 - 1 0 0 -'")
    assert [state(f) for f in storage.quota(tmp_path, lustre)] == ["ok", "ok"]


# --- files, by doing ---


@pytest.mark.slow
def test_probes_of_a_folder_and_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAIR_LIMIT_S", PATIENCE_S)
    found = by_name([*storage.probes(tmp_path), *storage.pair_here(tmp_path)])
    for name in ("rename over", "hard link", "O_EXCL", "permissions", "link, raced", "flock"):
        assert state(found[name]) == "ok", found[name]


def test_a_folder_that_is_gone_is_a_problem(tmp_path: Path) -> None:
    found = by_name(storage.probes(tmp_path / "gone"))
    assert state(found["hard link"]) == "problem"
    assert state(storage.writable(tmp_path / "gone")) == "problem"


def test_space(tmp_path: Path) -> None:
    assert [f.check for f in storage.space(tmp_path)] == ["space", "files left"]


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


@pytest.mark.slow
def test_sandboxes_by_doing(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(alone=True)  # a PATH without bwrap
    found = by_name(host.check_sandbox())
    assert found["bwrap"].value == "no bwrap here" and state(found["apptainer"]) == "note"
    assert state(found["level of runs"]) in ("ok", "note")  # the kernel's own, where this machine's allows them
    fake("bwrap", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    fake("singularity", "echo 'singularity-ce version 4.1'")
    found = by_name(host.check_sandbox())
    assert "No permissions" in found["bwrap"].value and state(found["bwrap"]) == "note"
    assert state(found["apptainer"]) == "ok" and "4.1" in found["apptainer"].value
    monkeypatch.setattr(host, "LEVELS", ())
    found = by_name(host.check_sandbox())
    assert found["level of runs"].value == "none" and "never rank" in found["level of runs"].so_what
