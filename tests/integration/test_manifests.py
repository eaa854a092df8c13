"""Manifests that an agent may drop: each gets one answer, nothing outside of the workspace is touched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from checkpoints import SINGLE, Desk, changed, save, tiny_tensors

from autorl_hpc.agents import load_agent
from autorl_hpc.files.layout import Root
from autorl_hpc.files.queue import claimed_entries, waiting
from autorl_hpc.records.entries import Evaluation, Score
from autorl_hpc.states import EntryKind, Fault, Split
from autorl_hpc.supervise import intake as intakes
from autorl_hpc.supervise import workspace
from autorl_hpc.tasks.loader import load_task

FIELDS = {
    *("submission_id", "timestamp", "model_path", "status", "score", "baseline_score", "improvement"),
    *("elapsed_seconds", "best", "total_submissions"),
}
"""What the reference's agents read."""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path / "world")
    save(made.workspace / "output" / "v1")
    return made


CONTENTS: list[tuple[str, bytes, str, str]] = [
    ("no JSON", b"output/v1", "manifest_not_json", "not JSON"),
    ("half", b'{"model_path": "output', "manifest_not_json", "not JSON"),
    ("empty", b"", "manifest_empty", "empty"),
    ("50 MB", b'{"model_path": "output/v1", "note": "' + b"x" * 50_000_000 + b'"}', "manifest_too_large", "65536"),
    ("a list", b'["output/v1"]', "manifest_invalid", "(the whole file)"),
    ("nested for ever", b"[" * 60_000, "manifest_not_json", "not JSON"),
    ("huge number", b'{"model_path": "a", "final": ' + b"9" * 5000 + b"}", "manifest_not_json", "not JSON"),
    ("content not UTF-8", b'{"model_path": "output/\xff"}', "manifest_not_json", "not JSON"),
    ("unknown field", b'{"model_path": "output/v1", "score": 100}', "manifest_invalid", "`score`: unknown field"),
    ("misspelt field", b'{"modelpath": "output/v1"}', "manifest_invalid", "did you mean `model_path`?"),
    ("path missing", b'{"note": "x"}', "manifest_invalid", "`model_path`: this field is missing"),
    ("path empty", b'{"model_path": ""}', "manifest_invalid", "`model_path`"),
    ("path too long", b'{"model_path": "' + b"x/" * 1000 + b'"}', "manifest_invalid", "`model_path`"),
    ("path with a null byte", rb'{"model_path": "output/v1\u0000"}', "manifest_invalid", "control characters"),
    ("path with an escape", rb'{"model_path": "\u001b[2Joutput/v1"}', "manifest_invalid", "control characters"),
    ("path of broken text", rb'{"model_path": "output/\ud800"}', "manifest_invalid", "`model_path`"),
    ("note of broken text", rb'{"model_path": "output/v1", "note": "\ud800"}', "manifest_invalid", "`note`"),
    ("note too long", b'{"model_path": "output/v1", "note": "' + b"x" * 501 + b'"}', "manifest_invalid", "`note`"),
    ("final of text", b'{"model_path": "output/v1", "final": "perhaps"}', "manifest_invalid", "`final`"),
    ("id of another", b'{"model_path": "output/v1", "id": "other"}', "manifest_invalid", "`id` is other"),
]
PATHS: list[tuple[str, str, str, str]] = [
    ("climbs", "output/../../secret", "path_outside", "`..`"),
    ("climbs and comes back", "output/../output/v1", "path_outside", "`..`"),
    ("absolute outside", "/etc", "path_outside", "outside the workspace"),
    ("the root", "/", "path_outside", "outside the workspace"),
    ("the workspace", ".", "path_outside", "the workspace itself"),
    ("submissions", "submissions", "path_outside", "submissions/"),
    ("its home", ".home", "path_outside", ".home/"),
    ("not there", "output/v9", "no_such_folder", "output/v9"),
    ("below a file", "output/v1/config.json/x", "not_a_folder", "output/v1/config.json"),
    ("a name too long", "output/" + "x" * 300, "no_such_folder", "output/xxx"),
]


REFUSED = [
    *((name, content, None, code, words) for name, content, code, words in CONTENTS),
    *((name, {"model_path": path}, path, code, words) for name, path, code, words in PATHS),
]


@pytest.mark.parametrize(
    ("content", "path", "code", "words"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_a_wrong_manifest_or_path_is_refused_with_advice(
    desk: Desk, content: object, path: str | None, code: str, words: str
) -> None:
    save(desk.workspace.parent / "secret")
    desk.drop("m1", content)
    assert desk.intake.poll() == 1
    answer = desk.answer("m1")
    assert (answer["status"], answer["code"]) == ("refused", code), answer
    assert words in answer["error"] and answer["advice"] and answer["score"] is None
    assert answer["fault"] == ("agent" if path is None else "artifact") and set(answer) >= FIELDS
    (submission,) = desk.view().submissions.values()
    assert (submission.manifest_id, submission.status, submission.message) == ("m1", "refused", answer["error"])
    assert desk.queued() == [] and desk.artifacts() == []
    assert os.listdir(desk.workspace / "submissions") == []


def test_every_spelling_of_a_right_path_is_taken(desk: Desk) -> None:
    right = ["output/v1/", "./output/v1", "output//v1", "output/./v1/.", f"{desk.workspace}/output/v1"]
    for number, given in enumerate(right):
        answer = desk.submit(f"m{number}", given)
        assert (answer["status"], answer["model_path"]) == ("accepted", "output/v1"), given
    for number, given in enumerate((f"{desk.workspace}/../workspace/output/v1", f"{desk.workspace}-other/v1")):
        assert desk.submit(f"n{number}", given)["code"] == "path_outside"


@pytest.mark.parametrize("where", ["output", "output/v1", "output/link", "models/inner/v1"])
def test_a_path_through_a_link_is_refused(desk: Desk, where: str) -> None:
    """The link may lead anywhere, into the workspace too."""
    outside = desk.workspace.parent / "outside"
    save(outside / "v1")
    path = desk.workspace / where
    if path.exists():
        shutil.rmtree(path)
    if where == "models/inner/v1":
        (desk.workspace / "models" / "inner").symlink_to(outside)
    else:
        path.symlink_to(outside / "v1" if path.name != "output" else outside)
    answer = desk.submit("m1", "output/v1" if where == "output" else where)
    assert (answer["status"], answer["code"]) == ("refused", "symlink")
    assert desk.artifacts() == []


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "folder"])
def test_a_manifest_that_is_no_file_is_refused_once(desk: Desk, kind: str) -> None:
    path = desk.workspace / "submissions" / "m1.json"
    (desk.workspace / "manifest").write_text('{"model_path": "output/v1"}')
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "inner").mkdir(parents=True)
    else:  # to a right manifest elsewhere: what is taken must be what was dropped
        path.symlink_to("../manifest" if kind == "link" else "nowhere")
    signal.alarm(20)  # a FIFO that blocks would hold the test for ever
    try:
        assert desk.intake.poll() == 1
        assert desk.intake.poll() == 0, "what can't be removed is handled again and again"
    finally:
        signal.alarm(0)
    answer = desk.answer("m1")
    assert (answer["status"], answer["code"], answer["fault"]) == ("refused", "manifest_unreadable", "agent")
    assert len(desk.view().submissions) == 1


def test_file_names_that_are_no_names_and_files_that_are_no_manifests(desk: Desk) -> None:
    submissions = os.fsencode(desk.workspace / "submissions")
    odd = [
        b"\xff\xfe.json",
        b"new\nline.json",
        b"a b.json",
        b"-v.json",
        b"\xc3\xa9" * 100 + b".json",
        b"x" * 250 + b".json",
    ]
    for name in odd:
        with open(os.path.join(submissions, name), "wb") as file:
            file.write(b'{"model_path": "output/v1"}')
    left = [b".tmp-m1.json", b".hidden.json", b"m1.json.part", b"m1", b".json"]
    for name in left:
        with open(os.path.join(submissions, name), "wb") as file:
            file.write(b'{"model_path": "output/v1"}')
    assert desk.intake.poll() == len(odd)
    results = os.listdir(desk.workspace / "results")
    assert len(results) == len(odd) and all(name.startswith("unnamed-") for name in results)
    assert {desk.answer(name.removesuffix(".json"))["status"] for name in results} == {"accepted"}
    assert sorted(os.listdir(submissions)) == sorted(left)


def test_an_accepted_manifest_is_answered_queued_and_removed(desk: Desk) -> None:
    answer = desk.submit("m1", "output/v1", note="a \x1b[2J note", final=True, id="m1")
    assert (answer["status"], answer["submission_id"], answer["score"]) == ("accepted", 1, None)
    assert set(answer) >= FIELDS
    (submission,) = desk.view().accepted()
    assert submission.final and submission.note == "a \\x1b[2J note"
    assert submission.content_hash == answer["content_hash"]
    assert waiting(desk.experiment.queue) == [f"f-{desk.record.run_id}--000001"]
    assert (desk.experiment.artifacts / answer["content_hash"] / "refs" / desk.record.run_id).exists()
    assert claimed_entries(desk.experiment.claims) == {}
    assert os.listdir(desk.workspace / "submissions") == []


def test_an_id_is_answered_once(desk: Desk) -> None:
    """By the next attempt too: an agent that is started over may drop the same names."""
    save(desk.workspace / "output" / "v2", tiny_tensors())
    first, wrong, other = (
        desk.submit(*each) for each in [("m1", "output/v1"), ("m2", "output/v9"), ("m1.again", "output/v1")]
    )
    for _ in range(2):
        assert desk.submit("m1", "output/v2") == first and desk.submit("m2", "output/v1") == wrong
        assert desk.answer("m1.again") == other, "its answer stands under its own name"
        for name in ("m1~again", "m2~again"):
            again = desk.answer(name)
            assert (again["status"], again["code"], again["fault"]) == ("refused", "duplicate_id", "agent")
            assert "new name" in again["advice"] and again["submission_id"] is None
        assert len(desk.view().submissions) == 3 and len(desk.queued()) == 1
        assert desk.intake.refused_unrecorded == 2 and os.listdir(desk.workspace / "submissions") == []
        desk.next_attempt()


def test_a_manifest_renamed_over_while_it_is_taken_is_taken_too(desk: Desk) -> None:
    """The second one must not be removed unread with the first."""
    path = desk.drop("m1", {"model_path": "output/v1"})
    second = path.with_name(".tmp-second")
    second.write_text('{"model_path": "output/v9"}')

    def revision() -> None:
        if second.exists():
            os.rename(second, path)

    desk.intake.ask_revision = lambda submission_id: revision
    assert desk.intake.poll() == 1
    assert path.exists(), "the second manifest was removed unread"
    assert desk.intake.poll() == 1
    assert desk.answer("m1~again")["code"] == "duplicate_id"


@pytest.mark.parametrize("folder", ["submissions", "results"])
@pytest.mark.parametrize("kind", ["link", "file", "fifo", "gone", "closed"])
def test_folders_that_are_exchanged_let_nothing_out_and_are_made_again(desk: Desk, folder: str, kind: str) -> None:
    outside = desk.workspace.parent / "outside"
    outside.mkdir()
    (outside / "m1.json").write_text('{"model_path": "output/v1"}')
    path = desk.workspace / folder
    if folder == "results":
        desk.drop("m2", {"model_path": "output/v1"})
    if kind == "closed":
        path.chmod(0)
    else:
        shutil.rmtree(path)
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "file":
        path.write_text("x")
    elif kind == "fifo":
        os.mkfifo(path)
    assert desk.intake.poll() == (folder == "results")
    assert [each.name for each in outside.iterdir()] == ["m1.json"], "something outside of the workspace was changed"
    assert (outside / "m1.json").read_text() == '{"model_path": "output/v1"}'
    assert path.is_dir() and not path.is_symlink()
    assert len(desk.view().accepted()) == (folder == "results")
    if folder == "results":
        assert desk.answer("m2")["status"] == "accepted"


def test_a_result_that_is_a_link_is_replaced_and_one_that_can_t_be_written_comes_later(desk: Desk) -> None:
    outside = desk.workspace.parent / "outside.json"
    outside.write_text("untouched")
    (desk.workspace / "results" / "m1.json").symlink_to(outside)
    assert desk.submit("m1", "output/v1")["status"] == "accepted"
    assert outside.read_text() == "untouched" and not (desk.workspace / "results" / "m1.json").is_symlink()
    (desk.workspace / "results" / "m2.json" / "inner").mkdir(parents=True)
    desk.drop("m2", {"model_path": "output/v1"})
    assert desk.intake.poll() == 1
    shutil.rmtree(desk.workspace / "results" / "m2.json")
    desk.intake.answers.update(desk.intake.chain.look())
    assert desk.answer("m2")["status"] == "accepted"


def test_laying_the_workspace_again_follows_no_link(staged: Path, tmp_path: Path) -> None:
    """A second attempt completes the workspace that the first one's agent has prepared for it."""
    desk = Desk(tmp_path / "world")
    root, path, outside = Root(staged), tmp_path / "workspace", tmp_path / "outside"
    task, agent = load_task("arithmetic"), load_agent("null")
    workspace.lay(path, root, desk.record, task, agent)
    assert (path / "models" / "autorl" / "tiny" / SINGLE).is_file() and (path / "data" / "train.jsonl").is_file()
    assert os.access(path / "submit", os.X_OK) and not (path / "data" / "MANIFEST.json").exists()
    assert not list((path / "models").rglob("MANIFEST.json"))
    outside.mkdir()
    for name in ("data", "results", "models", ".agent"):
        shutil.rmtree(path / name)
        (path / name).symlink_to(outside)
    for name in ("submit", "description.md", "instructions.md"):
        (path / name).unlink()
        (path / name).symlink_to(outside / f"new-{name}")
    (path / "time").write_text("the agent's own")
    existing = tmp_path / "existing"
    existing.write_text("untouched")
    (path / "scores").unlink()
    (path / "scores").symlink_to(existing)
    workspace.lay(path, root, desk.record, task, agent)
    assert os.listdir(outside) == [], "a link was followed"
    assert (path / "data" / "train.jsonl").is_file() and not (path / "submit").is_symlink()
    assert (path / "models" / "autorl" / "tiny" / SINGLE).is_file() and not (path / "models").is_symlink()
    assert (path / "time").read_text() == "the agent's own", "a file that stands was overwritten"
    assert not (path / "scores").is_symlink() and existing.read_text() == "untouched"
    assert not list(path.rglob(".tmp-*"))


# --- killed between two steps ---


@pytest.mark.parametrize("recovered", [True, False])
def test_killed_between_ledger_and_answer_it_stays_one_submission(desk: Desk, recovered: bool) -> None:
    desk.drop("m1", {"model_path": "output/v1"})
    child = os.fork()
    if child == 0:  # it dies between the ledger and the queue
        try:
            desk.intake._queue_unscored = lambda view: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
            desk.intake.poll()
        finally:
            os._exit(3)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert len(desk.view().accepted()) == 1 and desk.queued() == []
    assert os.listdir(desk.workspace / "results") == [] and os.listdir(desk.workspace / "submissions") == ["m1.json"]
    intake = desk.next_attempt()
    if recovered:
        intake.recover()
        intake.answers.update(intake.chain.look())  # the supervisor's other thread may be the first to tell it
    assert intake.poll() == 1
    assert desk.answer("m1")["status"] == "accepted"
    assert len(desk.view().submissions) == 1 and len(desk.queued()) == 1
    assert os.listdir(desk.workspace / "submissions") == [] and os.listdir(desk.workspace / "results") == ["m1.json"]
    assert intake.refused_unrecorded == 0


def commit_score(desk: Desk, content_hash: str, score: float | None, fault: Fault | None = None) -> None:
    """What a grader writes for the first submission."""
    recipe, reason = desk.record.recipe_hash, None if fault is None else "gone"
    fields = {"split": Split.FEEDBACK, "score": score, "n": 2, "fault": fault, "reason": reason, "recipe_hash": recipe}
    evaluation = Evaluation.model_validate({**fields, "content_hash": content_hash})
    body = Score(submission_id=1, evaluation=evaluation, grader="g", generation=1)
    desk.intake.chain.ledger.append(EntryKind.SCORE, body, role="grader")


@pytest.mark.parametrize("fault", [Fault.CLUSTER, Fault.GRADER])
def test_a_score_that_the_infrastructure_owes_does_not_answer_for_the_same_content(desk: Desk, fault: Fault) -> None:
    commit_score(desk, desk.submit("m1", "output/v1")["content_hash"], None, fault)
    assert desk.submit("m2", "output/v1")["same_as"] is None
    assert len(desk.queued()) == 2


# --- many ---


def test_more_than_the_ledger_names_are_all_answered(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few are right, with content of their own; the others are wrong in four ways."""
    count, right = 150, 5
    monkeypatch.setattr(intakes, "MAX_RECORDED_REFUSALS", 100)
    wrong: list[object] = [b"", b"{", {"model_path": "output/v9"}, {"model_path": "../x"}]
    for number in range(right):
        save(desk.workspace / "output" / f"w{number}", changed(tiny_tensors(), scale=1e-3 * (number + 1)))
    for number in range(count):
        is_right = number % (count // right) == 0
        value = {"model_path": f"output/w{number // (count // right)}"} if is_right else wrong[number % len(wrong)]
        desk.drop(f"m{number:05d}", value)
    longest, handled = 0.0, 0
    while handled < count:
        before = time.monotonic()
        got = desk.intake.poll()
        longest = max(longest, time.monotonic() - before)
        assert got, "intake stopped"
        handled += got
    answers = [json.loads(path.read_bytes()) for path in (desk.workspace / "results").iterdir()]
    assert len(answers) == count
    assert sum(answer["status"] == "accepted" for answer in answers) == right
    view = desk.view()
    assert len(view.accepted()) == right == len(desk.queued()) == len(desk.artifacts())
    assert len(view.refused()) == intakes.MAX_RECORDED_REFUSALS
    assert desk.intake.refused_unrecorded == count - right - intakes.MAX_RECORDED_REFUSALS
    assert os.listdir(desk.workspace / "submissions") == []
    assert longest < intakes.POLL_S + 20.0, "the end of a run would not be seen for that long"


def test_what_lies_there_at_the_end_can_t_keep_the_run_from_its_seal(desk: Desk) -> None:
    for number in range(50):
        desk.drop(f"m{number:02d}", {"model_path": "output/v9"})
    assert desk.intake.poll(patient=False, stop=lambda: len(desk.view().submissions) >= 5) == 5, "it can be stopped"
    desk.intake.end_poll_s = 0.0
    assert desk.intake.poll(patient=False) == 45
    late = [desk.answer(f"m{number:02d}") for number in range(5, 50)]
    assert {(answer["code"], answer["fault"]) for answer in late} == {("too_late", "agent")}
    assert desk.artifacts() == []


def test_copies_of_one_content_don_t_fill_the_ledger(desk: Desk) -> None:
    desk.intake.max_copies = 3
    for number in range(6):
        desk.submit(f"m{number}", "output/v1")
    assert [desk.answer(f"m{number}")["status"] for number in range(6)] == ["accepted"] * 4 + ["refused"] * 2
    assert desk.answer("m5")["code"] == "too_many_copies" and "as 1" in desk.answer("m5")["error"]
