"""The intake as a whole: its artifacts, answers and repairs, a full disk, and the budget's number of submissions."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import needs
import pytest
from adapters import write_adapter
from checkpoints import SINGLE, TINY, Desk, changed, save, save_shards, tiny_base, tiny_tensors

from autorl_hpc.files import artifacts
from autorl_hpc.files.checkpoint import folder_content_hash, tensors_of
from autorl_hpc.supervise import intake as intakes


def test_a_submission_overwritten_right_after_leaves_the_artifact_alone(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    folder = save(desk.checkpoint)
    answer = desk.accepted()
    artifact = desk.artifact(answer)
    kept = (artifact / SINGLE).read_bytes()
    with open(folder / SINGLE, "r+b") as file:
        file.seek(5000)
        file.write(b"\0" * 5000)  # in place: another name for the same file would show it
    assert (artifact / SINGLE).read_bytes() == kept
    assert folder_content_hash(artifact) == answer["content_hash"]
    assert len(tensors_of(artifact)) == len(tiny_base().shapes)
    second = desk.submit("v2", "output/v1")
    assert second["content_hash"] != answer["content_hash"] and second["same_as"] is None


def test_the_same_content_and_the_base_model_are_told_so(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    save(desk.checkpoint)
    save_shards(desk.workspace / "output" / "v2", 3)
    first, second = desk.submit("v1", "output/v1"), desk.submit("v2", "output/v2")
    assert (first["same_as"], second["same_as"]) == (None, first["submission_id"])
    assert second["content_hash"] == first["content_hash"]
    assert len(desk.queued()) == 1 and len(desk.artifacts()) == 1
    shutil.copytree(TINY, desk.workspace / "output" / "copy")
    answer = desk.submit("copy", "output/copy")
    assert answer["is_base_model"] is True and first["is_base_model"] is False


@pytest.fixture
def small_desk(tmp_path: Path) -> Iterator[tuple[Desk, Path]]:
    """A desk whose artifacts lie on a file system of 1 MiB, and a file there that takes the space of one artifact."""
    desk = Desk(tmp_path)
    disk = str(desk.experiment.artifacts)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if done.returncode:
        needs.skip("mount", f"mounting a tmpfs is not permitted here: {done.stderr.decode().strip()}")
    try:
        yield desk, desk.experiment.artifacts / "someone-else-s"
    finally:
        subprocess.run(["umount", "-l", disk], check=False)


@pytest.mark.parametrize(("write", "ballast_bytes"), [(save, 700_000), (write_adapter, 1_040_000)])
def test_a_full_disk_is_waited_for_and_never_charged_to_the_agent(
    small_desk: tuple[Desk, Path], write: Callable[[Path], Path], ballast_bytes: int
) -> None:
    desk, ballast = small_desk
    write(desk.checkpoint)
    ballast.write_bytes(b"\0" * ballast_bytes)
    manifest = desk.drop("v1", {"model_path": "output/v1"})
    for _ in range(2):
        assert desk.intake.poll() == 0
        assert manifest.exists() and not desk.view().submissions
        assert os.listdir(desk.workspace / "results") == []
        assert desk.artifacts() == [ballast.name], "an unfinished copy takes the space that is missing"
    ballast.unlink()
    assert desk.intake.poll() == 1
    assert desk.answer("v1")["status"] == "accepted" and not manifest.exists()
    assert len(desk.queued()) == 1


def test_a_full_disk_at_the_end_of_a_run_is_the_cluster_s_fault(small_desk: tuple[Desk, Path]) -> None:
    desk, ballast = small_desk
    save(desk.checkpoint)
    ballast.write_bytes(b"\0" * 700_000)
    desk.drop("v1", {"model_path": "output/v1"})
    assert desk.intake.poll(patient=False) == 1
    answer = desk.answer("v1")
    assert (answer["status"], answer["code"], answer["fault"]) == ("refused", "cluster", "cluster")
    assert os.strerror(errno.ENOSPC) in answer["error"] and str(desk.experiment.artifacts) not in answer["error"]


# --- what a killed attempt leaves ---


def killed_in_the_copy(desk: Desk) -> None:
    """A supervisor that is killed while it copies: a real process, a real kill."""
    child = os.fork()
    if child == 0:
        real = intakes.copy_checkpoint

        def copy(*arguments: object) -> None:
            real(*arguments)  # type: ignore[arg-type]
            os.kill(os.getpid(), signal.SIGKILL)

        intakes.copy_checkpoint = copy  # type: ignore[assignment]
        desk.intake.poll()
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_the_next_attempt_removes_unfinished_copies(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    save(desk.checkpoint)
    desk.drop("v1", {"model_path": "output/v1"})
    killed_in_the_copy(desk)
    (left,) = desk.artifacts()
    assert (desk.experiment.artifacts / left / SINGLE).stat().st_size > 400_000
    folder, run_id = desk.experiment.artifacts, desk.record.run_id
    others = artifacts.new_folder(folder, "another-run", 1), artifacts.new_folder(folder, run_id, 9)
    desk.next_attempt().recover()
    assert desk.artifacts() == sorted(path.name for path in others), "another run's, or a newer attempt's, was removed"
    assert desk.intake.poll() == 1
    assert desk.answer("v1")["status"] == "accepted" and len(desk.artifacts()) == 3


# --- the budget's number of submissions ---


def drop_different(desk: Desk, number: int) -> dict[str, object]:
    save(desk.workspace / "output" / f"v{number}", changed(tiny_tensors(), 1e-3 * (number + 1)))
    return desk.submit(f"v{number}", f"output/v{number}")


def test_no_more_checkpoints_than_the_budget_allows(tmp_path: Path) -> None:
    desk = Desk(tmp_path, max_submissions=2)
    assert [drop_different(desk, number)["submissions_left"] for number in range(2)] == [1, 0]
    for number in (2, 3):
        surplus = drop_different(desk, number)
        assert (surplus["status"], surplus["code"], surplus["fault"]) == ("refused", "too_many_submissions", "agent")
        assert "budget.max_submissions" in str(surplus["error"]) and surplus["submissions_left"] == 0
        desk.next_attempt()
    assert len(desk.artifacts()) == 2 and len(desk.queued()) == 2 and len(desk.view().accepted()) == 2


def test_copies_and_refusals_are_not_counted(tmp_path: Path) -> None:
    desk = Desk(tmp_path, max_submissions=2)
    write_adapter(desk.workspace / "output" / "v0")
    assert desk.submit("v0", "output/v0")["submissions_left"] == 1
    copies = [desk.submit(f"copy{number}", "output/v0") for number in range(3)]
    assert [(answer["same_as"], answer["submissions_left"]) for answer in copies] == [(1, 1)] * 3
    refused = desk.submit("nothing", "output/v9")
    assert (refused["status"], refused["submissions_left"]) == ("refused", 1)
    assert drop_different(desk, 1)["status"] == "accepted"
    at_the_end = desk.submit("copy9", "output/v0")
    assert (at_the_end["status"], at_the_end["same_as"], at_the_end["submissions_left"]) == ("accepted", 1, 0)


def test_an_answer_names_code_advice_and_fault_and_holds_no_control_characters(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    folder = save(desk.checkpoint)
    (folder / SINGLE).unlink()
    with open(os.path.join(os.fsencode(folder), b"\xff\x1b[2J.bin"), "wb"):
        pass
    answer = desk.refused()
    assert (answer["code"], answer["fault"], answer["score"]) == ("pickle", "artifact", None)
    assert "\\udcff\\x1b[2J.bin" in answer["error"] and "safe_serialization" in answer["advice"]
