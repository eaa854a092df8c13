"""Manifests that an agent may drop: each gets one answer, nothing outside of the workspace is touched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SINGLE, Desk, changed, save, tiny_tensors

from autorl_hpc.agents import load_agent
from autorl_hpc.files.layout import Root
from autorl_hpc.files.queue import claimed_entries, waiting
from autorl_hpc.records.entries import Evaluation, Score, Submission
from autorl_hpc.states import EntryKind, Fault, Split
from autorl_hpc.supervise import intake as intakes
from autorl_hpc.supervise import lint, workspace
from autorl_hpc.supervise.ledger_writer import Superseded
from autorl_hpc.tasks.loader import load_task

FIELDS = {
    "submission_id",
    "timestamp",
    "model_path",
    "status",
    "score",
    "baseline_score",
    "improvement",
    "elapsed_seconds",
    "best",
    "total_submissions",
}
"""What the reference's agents read."""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path / "world")
    save(made.workspace / "output" / "v1")
    return made


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = f"link to {os.readlink(path)}"
        elif path.is_file():
            found[str(path)] = path.read_bytes()
        else:
            found[str(path)] = "folder"
    return found


CONTENTS: list[tuple[str, bytes, str, str]] = [
    ("no JSON", b"output/v1", "manifest_not_json", "not JSON"),
    ("half", b'{"model_path": "output', "manifest_not_json", "not JSON"),
    ("empty", b"", "manifest_empty", "empty"),
    ("white space", b" \n\t ", "manifest_empty", "empty"),
    ("50 MB", b'{"model_path": "output/v1", "note": "' + b"x" * 50_000_000 + b'"}', "manifest_too_large", "65536"),
    ("a list", b'["output/v1"]', "manifest_invalid", "(the whole file)"),
    ("text", b'"output/v1"', "manifest_invalid", "(the whole file)"),
    ("null", b"null", "manifest_invalid", "(the whole file)"),
    ("nested for ever", b"[" * 60_000, "manifest_not_json", "not JSON"),
    ("huge number", b'{"model_path": "a", "final": ' + b"9" * 5000 + b"}", "manifest_not_json", "not JSON"),
    ("NaN", b'{"model_path": "output/v1", "final": NaN}', "manifest_invalid", "`final`"),
    ("content not UTF-8", b'{"model_path": "output/\xff"}', "manifest_not_json", "not JSON"),
    ("unknown field", b'{"model_path": "output/v1", "score": 100}', "manifest_invalid", "`score`: unknown field"),
    ("misspelt field", b'{"modelpath": "output/v1"}', "manifest_invalid", "did you mean `model_path`?"),
    ("path missing", b'{"note": "x"}', "manifest_invalid", "`model_path`: this field is missing"),
    ("path empty", b'{"model_path": ""}', "manifest_invalid", "`model_path`"),
    ("path a number", b'{"model_path": 7}', "manifest_invalid", "`model_path`"),
    ("path a list", b'{"model_path": ["output/v1"]}', "manifest_invalid", "`model_path`"),
    ("path too long", b'{"model_path": "' + b"x/" * 1000 + b'"}', "manifest_invalid", "`model_path`"),
    ("path with a null byte", rb'{"model_path": "output/v1\u0000"}', "manifest_invalid", "control characters"),
    ("path with a newline", rb'{"model_path": "output/v1\n"}', "manifest_invalid", "control characters"),
    ("path with an escape", rb'{"model_path": "\u001b[2Joutput/v1"}', "manifest_invalid", "control characters"),
    ("path of broken text", rb'{"model_path": "output/\ud800"}', "manifest_invalid", "`model_path`"),
    ("note of broken text", rb'{"model_path": "output/v1", "note": "\ud800"}', "manifest_invalid", "`note`"),
    ("note too long", b'{"model_path": "output/v1", "note": "' + b"x" * 501 + b'"}', "manifest_invalid", "`note`"),
    ("final of text", b'{"model_path": "output/v1", "final": "perhaps"}', "manifest_invalid", "`final`"),
    ("id of another", b'{"model_path": "output/v1", "id": "other"}', "manifest_invalid", "`id` is other"),
    ("newer version", b'{"model_path": "output/v1", "schema_version": 2}', "manifest_invalid", "newer"),
]
PATHS: list[tuple[str, str, str, str]] = [
    ("climbs", "output/../../secret", "path_outside", "`..`"),
    ("climbs and comes back", "output/../output/v1", "path_outside", "`..`"),
    ("climbs at once", "..", "path_outside", "`..`"),
    ("absolute outside", "/etc", "path_outside", "outside the workspace"),
    ("the root", "/", "path_outside", "outside the workspace"),
    ("the workspace", ".", "path_outside", "the workspace itself"),
    ("the workspace again", "./././/", "path_outside", "the workspace itself"),
    ("submissions", "submissions", "path_outside", "submissions/"),
    ("results", "results/x", "path_outside", "results/"),
    ("its home", ".home", "path_outside", ".home/"),
    ("not there", "output/v9", "no_such_folder", "output/v9"),
    ("a file", "output/v1/config.json", "not_a_folder", "output/v1/config.json"),
    ("below a file", "output/v1/config.json/x", "not_a_folder", "output/v1/config.json"),
    ("a name too long", "output/" + "x" * 300, "no_such_folder", "output/xxx"),
    ("a home by tilde", "~/model", "no_such_folder", "~"),
    ("a variable", "$HOME", "no_such_folder", "$HOME"),
]


def check_refused(desk: Desk, name: str, code: str, words: str) -> None:
    answer = desk.answer(name)
    assert (answer["status"], answer["code"]) == ("refused", code), answer
    assert words in answer["error"], answer["error"]
    assert answer["advice"] and answer["score"] is None and answer["fault"] in ("agent", "artifact")
    assert set(answer) >= FIELDS
    view = desk.view()
    assert [s.manifest_id for s in view.refused()] == [name] and not view.accepted()
    assert desk.queued() == [] and desk.artifacts() == []
    assert os.listdir(desk.workspace / "submissions") == []


@pytest.mark.parametrize(("content", "code", "words"), [row[1:] for row in CONTENTS], ids=[row[0] for row in CONTENTS])
def test_a_wrong_manifest_is_refused_with_advice(desk: Desk, content: bytes, code: str, words: str) -> None:
    desk.drop("m1", content)
    assert desk.intake.poll() == 1
    check_refused(desk, "m1", code, words)
    assert desk.answer("m1")["fault"] == "agent"


@pytest.mark.parametrize(("path", "code", "words"), [row[1:] for row in PATHS], ids=[row[0] for row in PATHS])
def test_a_wrong_path_is_refused_with_advice(desk: Desk, path: str, code: str, words: str) -> None:
    secret = desk.workspace.parent / "secret"
    save(secret)
    desk.drop("m1", {"model_path": path})
    assert desk.intake.poll() == 1
    check_refused(desk, "m1", code, words)


def test_absolute_paths_of_the_workspace_are_taken(desk: Desk) -> None:
    answer = desk.submit("m1", str(desk.workspace / "output" / "v1"))
    assert (answer["status"], answer["model_path"]) == ("accepted", "output/v1")
    assert desk.submit("m2", f"{desk.workspace}/../workspace/output/v1")["code"] == "path_outside"
    assert desk.submit("m3", f"{desk.workspace}-other/v1")["code"] == "path_outside"
    assert desk.submit("m4", str(desk.workspace))["code"] == "path_outside"


@pytest.mark.parametrize("given", ["output/v1/", "./output/v1", "output//v1", "output/./v1/."])
def test_other_spellings_of_a_right_path_are_taken(desk: Desk, given: str) -> None:
    assert desk.submit("m1", given)["model_path"] == "output/v1"


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


def odd_link(desk: Desk) -> str:
    """To a right manifest elsewhere: what is taken must be what was dropped."""
    (desk.workspace / "manifest").write_text('{"model_path": "output/v1"}')
    (desk.workspace / "submissions" / "m1.json").symlink_to("../manifest")
    return "manifest_unreadable"


def odd_dangling_link(desk: Desk) -> str:
    (desk.workspace / "submissions" / "m1.json").symlink_to("nowhere")
    return "manifest_unreadable"


def odd_fifo(desk: Desk) -> str:
    os.mkfifo(desk.workspace / "submissions" / "m1.json")
    return "manifest_unreadable"


def odd_folder(desk: Desk) -> str:
    (desk.workspace / "submissions" / "m1.json" / "inner").mkdir(parents=True)
    return "manifest_unreadable"


@pytest.mark.parametrize("make", [odd_link, odd_dangling_link, odd_fifo, odd_folder], ids=lambda m: m.__name__)
def test_a_manifest_that_is_no_file_is_refused_once(desk: Desk, make: Callable[[Desk], str]) -> None:
    code = make(desk)
    signal.alarm(20)  # a FIFO that blocks would hold the test for ever
    try:
        assert desk.intake.poll() == 1
        assert desk.intake.poll() == 0, "what can't be removed is handled again and again"
    finally:
        signal.alarm(0)
    answer = desk.answer("m1")
    assert (answer["status"], answer["code"], answer["fault"]) == ("refused", code, "agent")
    assert len(desk.view().submissions) == 1


NAMES = [
    b"\xff\xfe.json",
    b"new\nline.json",
    b"a b.json",
    b"a..b.json",
    b"-v.json",
    ("é" * 100).encode() + b".json",
    b"x" * 250 + b".json",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_name_that_is_no_name_is_answered_under_another(desk: Desk, name: bytes) -> None:
    with open(os.path.join(os.fsencode(desk.workspace / "submissions"), name), "wb") as file:
        file.write(b'{"model_path": "output/v1"}')
    assert desk.intake.poll() == 1
    (result,) = os.listdir(desk.workspace / "results")
    assert result.startswith("unnamed-")
    assert desk.answer(result.removesuffix(".json"))["status"] == "accepted"


def test_unfinished_and_foreign_files_are_left_alone(desk: Desk) -> None:
    for name in (".tmp-m1.json", ".hidden.json", "m1.json.part", "m1", ".json"):
        (desk.workspace / "submissions" / name).write_text('{"model_path": "output/v1"}')
    assert desk.intake.poll() == 0
    assert len(os.listdir(desk.workspace / "submissions")) == 5 and not desk.view().submissions


def test_an_accepted_manifest_is_answered_queued_and_removed(desk: Desk) -> None:
    answer = desk.submit("m1", "output/v1", note="a \x1b[2J note", final=True, id="m1")
    assert (answer["status"], answer["submission_id"], answer["score"]) == ("accepted", 1, None)
    assert set(answer) >= FIELDS
    (submission,) = desk.view().accepted()
    assert submission.final and submission.note == "a \\x1b[2J note"
    assert waiting(desk.experiment.queue) == [f"f-{desk.record.run_id}--000001"]
    assert (desk.experiment.artifacts / answer["content_hash"] / "refs" / desk.record.run_id).exists()
    assert claimed_entries(desk.experiment.claims) == {}
    assert os.listdir(desk.workspace / "submissions") == []


def test_the_same_id_again_is_refused_and_the_first_answer_stands(desk: Desk) -> None:
    first = desk.submit("m1", "output/v1")
    save(desk.workspace / "output" / "v2", tiny_tensors())
    assert desk.submit("m1", "output/v2") == first
    again = desk.answer("m1~again")
    assert (again["status"], again["code"], again["fault"]) == ("refused", "duplicate_id", "agent")
    assert "new name" in again["advice"]
    assert len(desk.view().submissions) == 1 and len(desk.queued()) == 1 and desk.intake.refused_unrecorded == 1


def test_the_same_id_after_a_refusal_is_refused_too(desk: Desk) -> None:
    first = desk.submit("m1", "output/v9")
    assert desk.submit("m1", "output/v1") == first
    assert desk.answer("m1~again")["code"] == "duplicate_id" and not desk.view().accepted()


def test_an_id_can_t_take_the_place_of_another_s_second_answer(desk: Desk) -> None:
    for name in ("m1.again", "m1"):
        desk.submit(name, "output/v1")
    desk.submit("m1", "output/v1")
    assert desk.answer("m1.again")["status"] == "accepted"


def test_a_manifest_renamed_over_while_it_is_taken_is_taken_too(desk: Desk) -> None:
    """The second one must not be removed unread with the first."""
    path = desk.drop("m1", {"model_path": "output/v1"})
    second = path.with_name(".tmp-second")
    second.write_text('{"model_path": "output/v9"}')
    real = desk.intake._take

    def slowly(folder: int, name: str, manifest_id: str, file: str, patient: bool, late: bool) -> None:
        real(folder, name, manifest_id, file, patient, late)
        if second.exists():
            os.rename(second, path)

    desk.intake._take = slowly  # type: ignore[method-assign]
    assert desk.intake.poll() == 1
    assert path.exists(), "the second manifest was removed unread"
    assert desk.intake.poll() == 1
    assert desk.answer("m1~again")["code"] == "duplicate_id"


@pytest.mark.parametrize("folder", ["submissions", "results"])
@pytest.mark.parametrize("kind", ["link", "file", "fifo", "gone"])
def test_folders_that_are_exchanged_let_nothing_out(desk: Desk, folder: str, kind: str) -> None:
    outside = desk.workspace.parent / "outside"
    outside.mkdir()
    (outside / "m1.json").write_text('{"model_path": "output/v1"}')
    before = snapshot(outside)
    path = desk.workspace / folder
    shutil.rmtree(path)
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "file":
        path.write_text("x")
    elif kind == "fifo":
        os.mkfifo(path)
    if folder == "results":
        desk.drop("m2", {"model_path": "output/v1"})
    handled = desk.intake.poll()
    assert snapshot(outside) == before, "something outside of the workspace was written or removed"
    if folder == "submissions":
        assert handled == 0 and not desk.view().submissions
        return
    assert handled == 1 and len(desk.view().accepted()) == 1
    if kind != "gone":  # the answer is given as soon as there is a place for it
        path.unlink()
        path.mkdir()
        desk.intake.answers.update(desk.intake.chain.look())
    assert desk.answer("m2")["status"] == "accepted"


def test_a_result_that_is_a_link_is_replaced_and_not_followed(desk: Desk) -> None:
    outside = desk.workspace.parent / "outside.json"
    outside.write_text("untouched")
    (desk.workspace / "results" / "m1.json").symlink_to(outside)
    assert desk.submit("m1", "output/v1")["status"] == "accepted"
    assert outside.read_text() == "untouched" and not (desk.workspace / "results" / "m1.json").is_symlink()


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


def dead_after_the_ledger(desk: Desk) -> None:
    """What a supervisor leaves that was killed between the ledger and the queue: a child does it and dies."""
    child = os.fork()
    if child == 0:
        try:
            desk.intake._queue = lambda submission_id: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
            desk.intake.poll()
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


@pytest.mark.parametrize("recovered", [True, False])
def test_killed_between_ledger_and_answer_it_stays_one_submission(desk: Desk, recovered: bool) -> None:
    desk.drop("m1", {"model_path": "output/v1"})
    dead_after_the_ledger(desk)
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


def test_recovering_queues_nothing_that_has_a_score(desk: Desk) -> None:
    answer = desk.submit("m1", "output/v1")
    evaluation = Evaluation(
        split=Split.FEEDBACK, content_hash=answer["content_hash"], score=50.0, n=2, recipe_hash=desk.record.recipe_hash
    )
    score = Score(submission_id=1, evaluation=evaluation, grader="g", generation=1)
    desk.intake.chain.ledger.append(EntryKind.SCORE, score, role="grader")
    for path in desk.experiment.queue.iterdir():
        path.unlink()
    desk.next_attempt().recover()
    assert desk.queued() == []
    desk.intake.answers.update(desk.intake.chain.look())
    assert (desk.answer("m1")["status"], desk.answer("m1")["score"]) == ("scored", 50.0)


@pytest.mark.parametrize("fault", [Fault.CLUSTER, Fault.GRADER])
def test_a_score_that_the_infrastructure_owes_does_not_answer_for_the_same_content(desk: Desk, fault: Fault) -> None:
    answer = desk.submit("m1", "output/v1")
    evaluation = Evaluation(
        split=Split.FEEDBACK,
        content_hash=answer["content_hash"],
        score=None,
        fault=fault,
        reason="gone",
        recipe_hash=desk.record.recipe_hash,
    )
    score = Score(submission_id=1, evaluation=evaluation, grader="g", generation=1)
    desk.intake.chain.ledger.append(EntryKind.SCORE, score, role="grader")
    assert desk.submit("m2", "output/v1")["same_as"] is None
    assert len(desk.queued()) == 2


def test_an_older_attempt_takes_nothing_in_any_more(desk: Desk) -> None:
    older = desk.intake
    newer = desk.next_attempt()
    desk.drop("m1", {"model_path": "output/v1"})
    with pytest.raises(Superseded):
        older.poll()
    assert (desk.workspace / "submissions" / "m1.json").exists() and not desk.view().submissions
    assert newer.poll() == 1


def test_a_queue_that_can_t_be_written_is_written_later(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intakes, "RETRY_CLUSTER_S", 0.0)
    desk.experiment.queue.rmdir()
    assert desk.submit("m1", "output/v1")["status"] == "accepted"
    assert desk.intake.poll() == 0
    desk.experiment.queue.mkdir()
    desk.intake.poll()
    assert waiting(desk.experiment.queue) == [f"f-{desk.record.run_id}--000001"]


# --- many ---


def test_ten_thousand_at_once_are_all_answered(desk: Desk, record_property: Callable[[str, object], None]) -> None:
    """Every thousandth is right, with content of its own; the others are wrong in four ways."""
    count, right = 10_000, 10
    wrong: list[object] = [b"", b"{", {"model_path": "output/v9"}, {"model_path": "../x"}]
    for number in range(right):
        save(desk.workspace / "output" / f"w{number}", changed(tiny_tensors(), scale=1e-3 * (number + 1)))
    for number in range(count):
        is_right = number % (count // right) == 0
        value = {"model_path": f"output/w{number // (count // right)}"} if is_right else wrong[number % len(wrong)]
        desk.drop(f"m{number:05d}", value)
    started = time.monotonic()
    longest, handled, polls = 0.0, 0, 0
    while handled < count:
        before = time.monotonic()
        got = desk.intake.poll()
        longest = max(longest, time.monotonic() - before)
        assert got, "intake stopped"
        handled += got
        polls += 1
    took_s = time.monotonic() - started
    record_property("seconds", round(took_s, 1))
    print(f"{count} manifests in {took_s:.1f} s, {polls} polls, the longest {longest:.1f} s")
    answers = [json.loads(path.read_bytes()) for path in (desk.workspace / "results").iterdir()]
    assert len(answers) == count
    assert sum(answer["status"] == "accepted" for answer in answers) == right
    view = desk.view()
    assert len(view.accepted()) == right == len(desk.queued()) == len(desk.artifacts())
    assert len(view.refused()) == intakes.MAX_RECORDED_REFUSALS
    assert desk.intake.refused_unrecorded == count - right - intakes.MAX_RECORDED_REFUSALS
    assert os.listdir(desk.workspace / "submissions") == []
    assert longest < intakes.POLL_S + 20.0, "the end of a run would not be seen for that long"


def test_what_lies_there_at_the_end_can_t_keep_the_run_from_its_seal(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intakes, "END_POLL_S", 0.0)
    for number in range(50):
        desk.drop(f"m{number:02d}", {"model_path": "output/v1"})
    assert desk.intake.poll(patient=False) == 50
    late = [desk.answer(f"m{number:02d}") for number in range(50)]
    assert {(answer["code"], answer["fault"]) for answer in late} == {("too_late", "agent")}
    assert desk.artifacts() == []


def test_a_defect_of_ours_does_not_stop_the_next_manifest(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    real = lint.lint_folder

    def fails_once(*arguments: Any) -> Any:
        monkeypatch.setattr(intakes, "lint_folder", real)
        raise TypeError("unhashable")

    monkeypatch.setattr(intakes, "lint_folder", fails_once)
    desk.drop("m1", {"model_path": "output/v1"})
    desk.drop("m2", {"model_path": "output/v1"})
    assert desk.intake.poll() == 2
    assert (desk.answer("m1")["code"], desk.answer("m1")["fault"]) == ("internal", "grader")
    assert desk.answer("m2")["status"] == "accepted"


def test_answers_hold_what_the_ledger_holds(desk: Desk) -> None:
    desk.submit("m1", "output/v1")
    desk.submit("m2", "output/v9")
    for submission in desk.view().submissions.values():
        assert isinstance(submission, Submission)
        answer = desk.answer(submission.manifest_id)
        assert answer["submission_id"] == submission.submission_id
        assert answer["content_hash"] == submission.content_hash
        assert answer["error"] == submission.message and answer["advice"] == submission.advice


def test_an_id_used_again_by_the_next_attempt_is_refused(desk: Desk) -> None:
    """An agent that is started over may drop the same names: another checkpoint must not get the old one's answer."""
    first = desk.submit("step1", "output/v1")
    desk.next_attempt()
    save(desk.workspace / "output" / "v2", tiny_tensors())
    desk.submit("step1", "output/v2")
    assert desk.answer("step1~again")["code"] == "duplicate_id"
    assert len(desk.view().submissions) == 1 and first["content_hash"] is not None
    assert "step1.json" not in os.listdir(desk.workspace / "submissions")


def test_a_last_poll_can_be_stopped(desk: Desk) -> None:
    for number in range(20):
        desk.drop(f"m{number:02d}", {"model_path": "output/v9"})
    assert desk.intake.poll(patient=False, stop=lambda: len(desk.view().submissions) >= 5) == 5
    assert len(os.listdir(desk.workspace / "submissions")) == 15


def test_copies_of_one_content_don_t_fill_the_ledger(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autorl_hpc.supervise.intake.MAX_RECORDED_COPIES", 3)
    for number in range(6):
        desk.submit(f"m{number}", "output/v1")
    assert [desk.answer(f"m{number}")["status"] for number in range(6)] == ["accepted"] * 4 + ["refused"] * 2
    assert desk.answer("m5")["code"] == "too_many_copies" and "as 1" in desk.answer("m5")["error"]
