"""Anchors: what was known elsewhere is held against chains that were written anew, and what they are worth is said."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import test_verify_alterations as altered
from test_verify_alterations import Place
from typer.testing import CliRunner, Result

from autorl_hpc.cli import app
from autorl_hpc.errors import AutorlError
from autorl_hpc.evidence import anchors
from autorl_hpc.evidence.anchors import KnownHeads
from autorl_hpc.evidence.verify import SHARED, VerifyResult, as_lines, verify_paths
from autorl_hpc.records.exchange import SHORT_HEX
from autorl_hpc.report import report

KEY = b"0123456789abcdef0123"


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


pristine, place = altered.pristine, altered.place


def verdicts(place: Place, known: KnownHeads = KnownHeads()) -> dict[str, VerifyResult]:  # noqa: B008
    return {verdict.run_id: verdict for verdict in verify_paths([place.path], known)}


def rewrite(place: Place) -> None:
    place.alter(3, note="another past")
    place.chain_anew(4)
    report.refresh([place.path])


def test_expected_heads(place: Place) -> None:
    before = verdicts(place)
    head, own = before[SHARED].head or "", before[place.run.run_id].head or ""
    for given in (head, head[:SHORT_HEX]):
        after = verdicts(place, KnownHeads((given,)))
        assert all(v.whole and v.as_dict()["anchored"] for v in after.values())
        assert f"anchored by the head that you gave, {head[:16]}..." in "\n".join(as_lines(list(after.values())))
    one = verdicts(place, KnownHeads((own,)))
    assert one[place.run.run_id].anchored_by and not one[place.other.run_id].anchored_by
    (alone,) = verify_paths([place.run.path], KnownHeads((own,)))
    assert alone.as_dict()["anchored"]

    rewrite(place)
    for given in (head, own):
        found = verdicts(place, KnownHeads((given,)))
        assert any(not v.whole and given in v.problems[0] for v in found.values()), given
        assert not any(v.as_dict()["anchored"] for v in found.values())


def test_heads_json(place: Place) -> None:
    lines = report.keep_heads(place.experiment)
    now = verdicts(place)
    assert f"head of exp: {now[SHARED].head}" in lines[-1] and all(v.whole for v in now.values())
    assert any(f"{now[place.run.run_id].head}" in line for line in lines[:-1])
    assert not now[SHARED].anchored_by  # it lies in the same account
    place.start_late()
    again = verdicts(place, KnownHeads((now[SHARED].head or "",)))  # the experiment's head as it was
    assert all(v.as_dict()["anchored"] for v in again.values())
    rewrite(place)
    assert "heads.json knows another entry" in verdicts(place)[place.run.run_id].problems[0]
    place.experiment.heads.write_text("[]")
    assert not verdicts(place)[SHARED].whole


@pytest.mark.parametrize("text", ["", "g" * 64, "0" * (SHORT_HEX - 1), "0" * 65])
def test_a_head_that_is_none(text: str) -> None:
    with pytest.raises(AutorlError, match="hexadecimal"):
        anchors.normal_head(text)


def test_everything_cut_off_after_the_seal(place: Place) -> None:
    """The chain, its copy and the mark agree; a head that was kept doesn't."""
    report.keep_heads(place.experiment)
    last = place.last()
    place.entry(last).unlink()
    place.chain_anew(1, count=last - 1)
    (place.experiment.finished / place.run.run_id).unlink()
    for path in (*place.run.report.iterdir(), *place.experiment.report.iterdir()):
        path.unlink()
    for path in place.run.items.glob("*.report.*"):  # else it is what tells of the cut
        path.unlink()
    (problem,) = verdicts(place)[place.run.run_id].problems
    assert problem.endswith(f"{last} entries, and {last - 1} are here: those after {last - 1:06d} are missing")
    place.experiment.heads.unlink()
    assert verdicts(place)[place.run.run_id].whole  # nothing is left that knows


def signed(place: Place, path: Path) -> KnownHeads:
    anchors.add_anchors(path, anchors.make_anchors([place.path], KEY))
    return KnownHeads(anchors=anchors.read_anchors(path, KEY))


def test_a_second_users_key(place: Place, tmp_path: Path) -> None:
    known, own = signed(place, tmp_path / "anchors.jsonl"), verdicts(place)[place.run.run_id].head or ""
    place.start_late()
    for before in (known, KnownHeads((own,))):
        later = verdicts(place, before)[place.run.run_id]
        assert later.as_dict()["anchored"] and any("1 entries were added since" in note for note in later.notes)
    rewrite(place)
    found = verdicts(place, known)
    assert "knows another entry" in found[place.run.run_id].problems[0]
    assert found[place.other.run_id].as_dict()["anchored"]
    shutil.rmtree(place.run.path)
    record = json.loads(place.experiment.resolved.read_text())
    place.experiment.resolved.write_text(json.dumps(record | {"runs": [place.other.run_id]}))
    gone = verdicts(place, known)[SHARED].problems
    assert any(place.run.run_id in problem and "it is not here" in problem for problem in gone)


def test_anchors_of_another_key_or_altered(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "anchors.jsonl"
    signed(place, path)
    with pytest.raises(AutorlError, match="not signed by this key"):
        anchors.read_anchors(path, KEY + b"x")
    for change in ({"made_at": "later"}, {"hmac_sha256": "0" * 64}):
        value = json.loads(path.read_text())
        other = tmp_path / "other.jsonl"
        other.write_text(json.dumps(value | change) + "\n")
        with pytest.raises(AutorlError, match="not signed by this key"):
            anchors.read_anchors(other, KEY)
    value["heads"]["runs"][0]["head"] = "0" * 64
    other.write_text(json.dumps(value))
    with pytest.raises(AutorlError, match="not signed by this key"):
        anchors.read_anchors(other, KEY)
    for text in ("{", "[]", "[" * 100_000, '{"heads": 1}'):
        other.write_text(text)
        with pytest.raises(AutorlError):
            anchors.read_anchors(other, KEY)
        with pytest.raises(AutorlError):  # nor is such a file added to
            anchors.add_anchors(other, [])


def test_a_damaged_chain_is_not_signed(place: Place) -> None:
    place.entry(3).unlink()
    with pytest.raises(AutorlError, match="000003"):
        anchors.make_anchors([place.path], KEY)


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(AutorlError, match="can't be read"):
        anchors.read_key_file(path)
    path.write_bytes(KEY + b"\n")
    path.chmod(0o640)
    with pytest.raises(AutorlError, match="can be read by others"):
        anchors.read_key_file(path)
    path.chmod(0o600)
    assert anchors.read_key_file(path) == KEY
    path.write_bytes(b"short\n")
    with pytest.raises(AutorlError, match="a key has"):
        anchors.read_key_file(path)


@pytest.mark.slow
def test_the_commands(place: Place, tmp_path: Path) -> None:
    key, out = tmp_path / "key", tmp_path / "anchors.jsonl"
    key.write_bytes(KEY)
    key.chmod(0o600)

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, words)

    runs = str(place.path)
    done = run("anchor", runs, "--key", str(key), "--out", str(out))
    assert done.exit_code == 0 and "exp: 2 runs, head " in done.stdout, done.stdout
    done = run("verify", runs, "--anchors", str(out), "--key", str(key))
    assert done.exit_code == 0 and "2 runs, 0 damaged. 2 anchored. An anchor shows" in done.stdout, done.stdout
    assert isinstance(run("verify", runs, "--anchors", str(out)).exception, AutorlError)
    done = run("verify", runs, "--expect", "0" * 64)
    assert done.exit_code == 1 and "no run or experiment here has, or had, the head" in done.stdout
    status = run("status", runs)
    head = json.loads(run("status", runs, "--json").stdout)[0]["head"]
    assert head in status.stdout and head in run("report", runs).stdout
    assert run("verify", runs, "--expect", head).exit_code == 0


SQUEUE = """#!/usr/bin/env bash
printf '%s\\n' "$(cat "$FAKE/comment")" | if [[ "$*" == *"%i"* ]]; then sed $'s/^/71\\x1f/'; else cat; fi
"""
SCONTROL = """#!/usr/bin/env bash
[ -e "$FAKE/forbidden" ] && { echo "scontrol: error: Access denied" >&2; exit 1; }
for word in "$@"; do case "$word" in Comment=*) printf '%s' "${word#Comment=}" > "$FAKE/comment";; esac; done
"""


def test_the_comment_of_the_report_job(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler alone is played: its clients' words are the sandbox's (tests/slurm asks the real one)."""
    fake = tmp_path / "bin"
    fake.mkdir()
    for name, text in (
        ("squeue", SQUEUE),
        ("scontrol", SCONTROL),
        ("sbatch", ""),
        ("scancel", ""),
        ("sacct", "exit 1"),
    ):
        (fake / name).write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        (fake / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    (tmp_path / "comment").write_text("autorl-hpc 0123456789ab number 4")
    jobs = {"name": "0123456789ab.report", "role": "report", "number": 4, "job_id": "71"}
    (place.path / "slurm.json").write_text(json.dumps({"uid": "0123456789ab", "cluster": "mine", "submitted": [jobs]}))
    assert "no job comment" in " ".join(verdicts(place)[SHARED].notes)
    for _ in range(2):  # a second time replaces the first
        assert "in this job's comment too" in report.keep_heads(place.experiment)[-1]
    head = verdicts(place)[SHARED].head or ""
    assert (tmp_path / "comment").read_text() == f"autorl-hpc 0123456789ab number 4 head {head[:SHORT_HEX]}"
    found = verdicts(place)
    assert all("the comment of Slurm job 71" in v.anchored_by[0] and v.whole for v in found.values())
    place.start_late()  # what came late leaves it standing, by heads.json
    assert all(v.as_dict()["anchored"] for v in verdicts(place).values())
    rewrite(place)
    place.experiment.heads.unlink()
    assert "the comment of Slurm job 71 names the head" in verdicts(place)[SHARED].problems[0]
    (tmp_path / "forbidden").touch()  # a site that forbids it: said, and nothing fails
    assert "in this log and in heads.json alone" in report.keep_heads(place.experiment)[-1]
