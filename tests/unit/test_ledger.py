"""The ledger: a chain that shows every change, and entries that stand once however many processes write."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import PATIENCE_S

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.ledger import Ledger, sha256_hex
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records import canonical_json
from autorl_hpc.records.base import NewerVersion
from autorl_hpc.records.entries import AttemptEnded, AttemptStarted, Evaluation, Score, Sealed, Submission
from autorl_hpc.states import EndedBy, EntryKind, Fault, Split
from autorl_hpc.supervise.attempt_ledger import LedgerWriter, Superseded


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.ledger.mkdir(parents=True)
    made.record.write_text('{"run_id": "run"}\n')
    return made


def started(number: int) -> AttemptStarted:
    return AttemptStarted(attempt=number, elapsed_s=float(number), workspace="w")


def refused(number: int) -> Submission:
    return Submission(submission_id=number, manifest_id=f"m{number}", status="refused", model_path=None, elapsed_s=0.0)


@pytest.fixture
def five(run: RunDir) -> RunDir:
    ledger = Ledger(run)
    for number in range(1, 6):
        assert ledger.append(EntryKind.ATTEMPT_STARTED, started(number), role="supervisor") is not None
    return run


def entry_path(run: RunDir, number: int) -> Path:
    return run.ledger / f"{number:06d}.json"


def overwrite(path: Path, data: bytes) -> None:
    """As somebody with the account's rights would: entries are read-only files."""
    os.chmod(path, 0o644)
    path.write_bytes(data)


def test_each_entry_holds_the_hash_of_the_one_before(five: RunDir) -> None:
    before = sha256_hex(five.record.read_bytes())
    for number in range(1, 6):
        data = entry_path(five, number).read_bytes()
        value = json.loads(data)
        assert (value["seq"], value["prev"]) == (number, before)
        assert data == canonical_json(value) + b"\n"
        before = sha256_hex(data)
    ledger = Ledger(five)
    assert [linked.body.attempt for linked in ledger.read()] == [1, 2, 3, 4, 5]
    assert ledger.head() == before


def test_unless_leaves_the_chain_as_it_is(five: RunDir) -> None:
    seen: list[int] = []

    def stands(entries: object) -> bool:
        seen.append(len(entries))  # type: ignore[arg-type]
        return True

    assert Ledger(five).append(EntryKind.ATTEMPT_STARTED, started(6), role="grader", unless=stands) is None
    assert seen == [5] and len(os.listdir(five.ledger)) == 5


WRITER = """
import sys, time
from pathlib import Path
from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.records.entries import AttemptEnded
from autorl_hpc.states import EntryKind
run, me, entries, racers = RunDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
ready = run.path / "ready"
(ready / me).touch()
while len(list(ready.iterdir())) < racers:
    time.sleep(0.001)
ledger, written = Ledger(run), 0
for number in range(entries):
    for reason in (f"once-{number}", f"{me}-{number}"):
        body = AttemptEnded(attempt=number, elapsed_s=0.0, reason=reason)
        there = lambda chain: any(linked.body.reason == reason for linked in chain)
        written += ledger.append(EntryKind.ATTEMPT_ENDED, body, role="grader", unless=there) is not None
print(written)
"""


@pytest.mark.slow
def test_eight_writers_commit_each_entry_once(run: RunDir) -> None:
    """Fifty entries that must stand once and are written by everybody, and fifty of each process's own."""
    racers, entries = 8, 50
    (run.path / "ready").mkdir()

    def write(number: int) -> int:
        command = [sys.executable, "-c", WRITER, str(run.path), f"w{number}", str(entries), str(racers)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout)

    with ThreadPoolExecutor(racers) as pool:
        written = list(pool.map(write, range(racers)))
    reasons = [linked.body.reason for linked in Ledger(run).read()]
    assert sum(written) == len(reasons) == entries + racers * entries
    assert len(set(reasons)) == len(reasons), "an entry stands twice"
    assert sum(reason.startswith("once-") for reason in reasons) == entries
    assert len(os.listdir(run.ledger)) == len(reasons), "a loser left its temporary file"


def edit(number: int, change: Callable[[bytes], bytes]) -> Callable[[RunDir], object]:
    return lambda run: overwrite(entry_path(run, number), change(entry_path(run, number).read_bytes()))


def swap(run: RunDir, *fields: str) -> None:
    """Exchange the third entry with the fourth; of `fields` alone, each keeps its place in the chain."""
    third, fourth = json.loads(entry_path(run, 3).read_bytes()), json.loads(entry_path(run, 4).read_bytes())
    for field in fields or tuple(third):
        third[field], fourth[field] = fourth[field], third[field]
    for number, entry in ((3, third), (4, fourth)):
        overwrite(entry_path(run, number), canonical_json(entry) + b"\n")


def unknown_field(data: bytes) -> bytes:
    value = json.loads(data)
    value["body"]["score"] = 100
    return canonical_json(value) + b"\n"


alter_byte = edit(3, lambda data: data.replace(b'"elapsed_s":3.0', b'"elapsed_s":2.0'))
DAMAGE: dict[str, tuple[Callable[[RunDir], object], str, str]] = {
    "a byte": (alter_byte, "the chain breaks before ledger entry 000004", "000004.json"),
    "white space in the last": (edit(5, lambda data: data.replace(b":", b": ", 1)), "ledger entry 000005 is not written as this suite writes it", "000005.json"),
    "a hole": (lambda run: entry_path(run, 3).unlink(), "ledger entry 000003.json is missing, though 000004.json is there", "000003.json"),
    "two exchanged": (swap, "ledger entry 000003 calls itself number 4", "000003.json"),
    "their bodies": (lambda run: swap(run, "body"), "the chain breaks before ledger entry 000004", "000004.json"),
    "empty": (edit(5, lambda data: b""), "ledger entry 000005 is damaged", "000005.json"),
    "cut": (edit(5, lambda data: data[:100]), "ledger entry 000005 is damaged", "000005.json"),
    "not UTF-8": (edit(5, lambda data: b"\xff\xfe" + data), "ledger entry 000005 is damaged", "000005.json"),
    "endless": (edit(5, lambda data: b"[" * 100_000), "ledger entry 000005 is damaged", "000005.json"),
    "another run": (lambda run: run.record.write_text('{"run_id": "ran"}\n'), "the chain breaks before ledger entry 000001: run.json", "000001.json"),
    "beyond": (lambda run: entry_path(run, 5).rename(entry_path(run, 7)), "ledger entry 000005.json is missing, though 000007.json is there", "000005.json"),
    "unknown field": (edit(5, unknown_field), "ledger entry 000005 is damaged: field `score`: unknown field", "000005.json"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "named", "file"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(five: RunDir, damage: Callable[[RunDir], object], named: str, file: str) -> None:
    damage(five)
    before = sorted(os.listdir(five.ledger))
    for use in (
        lambda: Ledger(five).read(),
        lambda: Ledger(five).append(EntryKind.ATTEMPT_STARTED, started(6), role="supervisor"),
    ):
        with pytest.raises(AutorlError) as caught:
            use()
        assert named in caught.value.what
        assert caught.value.where == str(five.ledger / file)
        assert caught.value.fault is Fault.CLUSTER and caught.value.next_step
    assert sorted(os.listdir(five.ledger)) == before, "something was written behind the damage"


def test_an_entry_of_a_newer_version_is_not_called_damaged(five: RunDir) -> None:
    value = json.loads(entry_path(five, 5).read_bytes())
    value["schema_version"] = 2
    value["new_field"] = 1
    overwrite(entry_path(five, 5), canonical_json(value) + b"\n")
    with pytest.raises(NewerVersion) as caught:
        Ledger(five).read()
    assert "ledger entry 000005" in caught.value.what and "newer autorl-hpc" in caught.value.what
    assert caught.value.where == str(entry_path(five, 5))
    assert "newer autorl-hpc" in (caught.value.next_step or "")


def test_the_sealed_copy_is_read_when_the_folder_is_gone_and_its_damage_is_named(five: RunDir) -> None:
    ledger = Ledger(five)
    ledger.seal_file()
    head = ledger.head()
    for path in five.ledger.iterdir():
        path.unlink()
    five.ledger.rmdir()
    again = Ledger(five)
    assert len(again.read()) == 5 and again.head() == head
    five.sealed_ledger.write_bytes(five.sealed_ledger.read_bytes().replace(b'"elapsed_s":3.0', b'"elapsed_s":2.0'))
    with pytest.raises(AutorlError, match="the chain breaks before ledger entry 000004") as caught:
        Ledger(five).read()
    assert caught.value.where == str(five.sealed_ledger)


def test_an_older_attempt_can_write_nothing_any_more(run: RunDir) -> None:
    older, newer = LedgerWriter(run), LedgerWriter(run)
    assert older.begin(0.0, "w") == 1
    older.write(EntryKind.SUBMISSION, refused(1))
    assert newer.begin(5.0, "w") == 2
    with pytest.raises(Superseded):
        older.look()
    # That look has read the newer attempt's entry already; the next write must still see it.
    with pytest.raises(Superseded):
        older.write(EntryKind.SUBMISSION, refused(2))
    with pytest.raises(Superseded):
        older.write(EntryKind.ATTEMPT_ENDED, AttemptEnded(attempt=1, elapsed_s=1.0, reason="late"))
    newer.write(EntryKind.SUBMISSION, refused(2))
    assert len(Ledger(run).read()) == 4


def test_racing_attempts_get_different_numbers(run: RunDir) -> None:
    """An attempt may be superseded before it has read its own entry, so the ledger is asked."""

    def begin(writer: LedgerWriter) -> None:
        with contextlib.suppress(Superseded):
            writer.begin(0.0, "w")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(begin, [LedgerWriter(run) for _ in range(8)]))
    attempts = RunView.of(Ledger(run).read()).attempts
    assert [attempt.attempt for attempt in attempts] == list(range(1, 9))


def test_submissions_after_the_seal_don_t_count(run: RunDir) -> None:
    chain = LedgerWriter(run)
    chain.begin(0.0, "w")
    sealed = Sealed(submissions=(), ended_by=EndedBy.BUDGET, exit_code=None, elapsed_s=1.0, given_back_s=0.0)
    chain.write(EntryKind.SEALED, sealed)
    with pytest.raises(Superseded):
        chain.write(EntryKind.SUBMISSION, refused(1))
    Ledger(run).append(EntryKind.SUBMISSION, refused(1), role="supervisor")  # by other means
    assert not RunView.of(Ledger(run).read()).submissions


def test_what_stands_once_is_what_came_first(run: RunDir) -> None:
    """A second score, by whatever means it came to be, changes nothing; of equal scores the earliest submission is the best."""
    ledger = Ledger(run)
    for number in (1, 2):
        accepted = refused(number).model_copy(update={"status": "accepted", "content_hash": str(number) * 64})
        ledger.append(EntryKind.SUBMISSION, accepted, role="supervisor")
    for number, points in ((1, 50.0), (2, 50.0), (1, 99.0)):
        evaluation = Evaluation(
            split=Split.FEEDBACK, content_hash=str(number) * 64, score=points, n=2, correct=1, recipe_hash="0" * 64
        )
        score = Score(submission_id=number, evaluation=evaluation, grader="g", generation=1)
        ledger.append(EntryKind.SCORE, score, role="grader")
    view = RunView.of(ledger.read())
    assert view.scores[1].evaluation.score == 50.0
    best = view.best()
    assert best is not None and best.submission_id == 1
