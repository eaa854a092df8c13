"""The chain that a report reads: whole ledgers, and each kind of damage is seen."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from bigtree import BigTree
from treemaker import Tree, outcomes

from autorl_hpc.files.layout import RunDir
from autorl_hpc.report.run_folder import read_chain


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = Tree(tmp_path / "exp").run().start()
    made.submit(5.0, outcomes(40, range(15)), note='says ","kind":"score","prev":" and "} and \\ and é')
    made.refuse(6.0, "x" * 90_000)  # longer than one read
    made.seal().close(outcomes(100, range(30)))
    return made.dir


def test_a_sealed_copy_alone(run: RunDir) -> None:
    whole = read_chain(run)
    for path in run.ledger.iterdir():
        path.unlink()
    run.ledger.rmdir()
    assert read_chain(run) == whole


def test_big_trees_are_as_the_ledger_writes_them(tmp_path: Path) -> None:
    BigTree(tmp_path / "runs", submissions=4, n_feedback=20, n_report=30).grow(12)
    folders = sorted((tmp_path / "runs" / "exp000").glob("gsm8k*"))
    assert len(folders) == 12
    for run in map(RunDir, folders):
        chain = read_chain(run)
        assert chain.damage is None and chain.entries


def altered(change: Callable[[bytes], bytes], name: str = "000003.json") -> Callable[[RunDir], None]:
    def alter(run: RunDir) -> None:
        path = run.ledger / name
        path.chmod(0o644)
        path.write_bytes(change(path.read_bytes()))

    return alter


def _fifo(run: RunDir) -> None:
    (run.ledger / "000003.json").unlink()
    os.mkfifo(run.ledger / "000003.json")


def _link(run: RunDir) -> None:
    (run.ledger / "000003.json").rename(run.path / "moved")
    (run.ledger / "000003.json").symlink_to("../moved")


def _last_with_a_space(data: bytes) -> bytes:
    return data.replace(b'{"at":', b'{"at": ')


DAMAGE: dict[str, Callable[[RunDir], None]] = {
    "a digit": altered(lambda data: data.replace(b'"elapsed_s":5', b'"elapsed_s":6')),
    "a key twice": altered(lambda data: data.replace(b'"body":{', b'"body":{"elapsed_s":1,')),
    "a newer version": altered(lambda data: data.replace(b'"schema_version":1', b'"schema_version":2')),
    "another kind": altered(lambda data: data.replace(b'"kind":"submission"', b'"kind":"score"')),
    "an unknown kind": altered(lambda data: data.replace(b'"kind":"submission"', b'"kind":"party"')),
    "cut off": altered(lambda data: data[:-20]),
    "no byte": altered(lambda data: b""),
    "not UTF-8": altered(lambda data: data.replace("é".encode(), b"\xff")),
    "a second line": altered(lambda data: data + data),
    "the last not canonical": altered(_last_with_a_space, "000007.json"),
    "the last body not canonical": altered(lambda d: d.replace(b'"body":{', b'"body": {'), "000007.json"),
    "gone": lambda run: (run.ledger / "000003.json").unlink(),
    "the first gone": lambda run: (run.ledger / "000001.json").unlink(),
    "a stranger": lambda run: (run.ledger / "notes.txt").touch() or None,
    "FIFO": _fifo,
    "link": _link,
    "sealed copy longer": lambda run: run.sealed_ledger.write_bytes(run.sealed_ledger.read_bytes() + b"{}\n") and None,
    "sealed copy cut": lambda run: run.sealed_ledger.write_bytes(run.sealed_ledger.read_bytes()[:-5]) and None,
    "run.json": lambda run: run.record.write_bytes(run.record.read_bytes() + b" ") and None,
}
HARMLESS = ("a stranger", "link")
"""Nothing of a ledger."""


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_seen(run: RunDir, name: str) -> None:
    from autorl_hpc.records.base import NewerVersion

    DAMAGE[name](run)
    if name == "a newer version":
        with pytest.raises(NewerVersion):
            read_chain(run)
    else:
        assert (read_chain(run).damage is None) == (name in HARMLESS)
