"""The intake as a whole: its artifacts, answers and repairs, and a full disk."""

from __future__ import annotations

import errno
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from broken import (
    one_value,
)
from checkpoints import (
    EMBEDDING,
    SINGLE,
    TINY,
    Desk,
    save,
    save_shards,
    tiny_base,
    with_strange_names,
)

from autorl_hpc.files.checkpoint import folder_content_hash, tensors_of
from autorl_hpc.supervise import intake as intakes


def test_a_submission_overwritten_right_after_leaves_the_artifact_alone(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    folder = save(desk.workspace / "output" / "v1")
    answer = desk.submit("v1", "output/v1")
    assert answer["status"] == "accepted" and answer["error"] is None
    artifact = desk.experiment.artifacts / answer["content_hash"]
    kept = (artifact / SINGLE).read_bytes()
    with open(folder / SINGLE, "r+b") as file:
        file.seek(5000)
        file.write(b"\0" * 5000)  # in place: another name for the same file would show it
    assert (artifact / SINGLE).read_bytes() == kept
    assert folder_content_hash(artifact) == answer["content_hash"]
    assert len(tensors_of(artifact)) == len(tiny_base().shapes)
    second = desk.submit("v2", "output/v1")
    assert second["content_hash"] != answer["content_hash"] and second["same_as"] is None


def test_the_same_content_again_is_answered_from_the_ledger(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    save(desk.workspace / "output" / "v1")
    save_shards(desk.workspace / "output" / "v2", 3)
    first, second = desk.submit("v1", "output/v1"), desk.submit("v2", "output/v2")
    assert (first["same_as"], second["same_as"]) == (None, first["submission_id"])
    assert second["content_hash"] == first["content_hash"]
    assert len(desk.queued()) == 1 and len(desk.artifacts()) == 1


def test_a_copy_of_the_base_model_is_told_so(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    shutil.copytree(TINY, desk.workspace / "output" / "copy")
    answer = desk.submit("copy", "output/copy")
    assert answer["status"] == "accepted" and answer["is_base_model"] is True


def test_an_answer_names_code_advice_and_fault_and_holds_no_control_characters(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    folder = save(desk.workspace / "output" / "v1")
    (folder / SINGLE).unlink()
    with open(os.path.join(os.fsencode(folder), b"\xff\x1b[2J.bin"), "wb"):
        pass
    answer = desk.submit("v1", "output/v1")
    assert (answer["status"], answer["code"], answer["fault"], answer["score"]) == (
        "refused",
        "pickle",
        "artifact",
        None,
    )
    assert "\\udcff\\x1b[2J.bin" in answer["error"] and "safe_serialization" in answer["advice"]
    assert desk.view().refused()[0].message == answer["error"]


def test_names_that_are_no_text_are_left_aside_by_the_intake(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    with_strange_names(save(desk.workspace / "output" / "v1"))
    answer = desk.submit("v1", "output/v1")
    assert answer["status"] == "accepted" and "\\udcff\\udcfe.txt" in answer["ignored_files"]


def test_a_refused_copy_leaves_nothing_behind(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    one_value(EMBEDDING, math.nan)(desk.workspace / "output" / "v1")
    assert desk.submit("v1", "output/v1")["code"] == "not_finite"
    assert desk.artifacts() == [] and desk.queued() == []


@pytest.fixture
def small_desk(tmp_path: Path) -> Iterator[tuple[Desk, Path]]:
    """A desk whose artifacts lie on a file system of 1 MiB, and a file there that takes the space of one artifact."""
    desk = Desk(tmp_path)
    disk = str(desk.experiment.artifacts)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.decode().strip()}")
    try:
        yield desk, desk.experiment.artifacts / "someone-else-s"
    finally:
        subprocess.run(["umount", "-l", disk], check=False)


def test_a_full_disk_is_waited_for_and_never_charged_to_the_agent(
    small_desk: tuple[Desk, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, ballast = small_desk
    monkeypatch.setattr(intakes, "RETRY_CLUSTER_S", 0.0)
    save(desk.workspace / "output" / "v1")
    ballast.write_bytes(b"\0" * 700_000)
    manifest = desk.drop("v1", {"model_path": "output/v1"})
    for _ in range(3):
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
    save(desk.workspace / "output" / "v1")
    ballast.write_bytes(b"\0" * 700_000)
    desk.drop("v1", {"model_path": "output/v1"})
    assert desk.intake.poll(patient=False) == 1
    answer = desk.answer("v1")
    assert (answer["status"], answer["code"], answer["fault"]) == ("refused", "cluster", "cluster")
    assert os.strerror(errno.ENOSPC) in answer["error"]
