"""A log that is found late is booked to when it was written, as far as that can be known."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers import PATIENCE_S

from autorl_hpc.recorder import trainings
from autorl_hpc.recorder.trainings import Backdating, Trainings
from autorl_hpc.recorder.usage import Sweep
from autorl_hpc.recorder.watch import Moment

NOW = 1_000_000.0


def moment(elapsed_s: float) -> Moment:
    return Moment(elapsed_s, "2026-01-01T00:00:00+00:00", 1)


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [
        (0.0, 40.0),
        (6.5, 33.5),
        (-90.0, 40.0),  # the file server's clock is ahead
        (900.0, 12.0),  # it is behind, or the file's owner set it: not before the walk that did not find it
    ],
)
def test_a_time_is_believed_within_what_is_known(age_s: float, expected: float) -> None:
    times = Backdating(clock=lambda: NOW)
    for walks, elapsed_s in ((1, 12.0), (1, 13.0), (2, 24.0), (3, 36.0)):
        times.tick(walks, moment(elapsed_s))
    assert times.moment(NOW - age_s, moment(40.0)).elapsed_s == expected


def test_before_there_were_walks_the_start_is_the_bound() -> None:
    assert Backdating(clock=lambda: NOW).moment(NOW - 900, moment(5.0)).elapsed_s == 0.0


def test_steps_of_a_state_found_late_are_booked_to_its_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "SLICE_S", PATIENCE_S)  # a busy machine may stop this process in the midst of a look
    monkeypatch.setattr(trainings, "CLOSE_S", PATIENCE_S)
    workspace = tmp_path / "w"
    (workspace / "output").mkdir(parents=True)
    sweep = Sweep(workspace)
    watch = Trainings(tmp_path / "agent.log", sweep, tmp_path / "training.jsonl", tmp_path / "events.jsonl")
    watch._times = Backdating(clock=lambda: NOW)
    watch.look(moment(3.0))
    state = workspace / "output" / "trainer_state.json"
    state.write_text('{"log_history": [{"step": 1, "loss": 0.5, "learning_rate": 0.1, "epoch": 0.1}]}')
    log = workspace / "output" / "train.log"
    log.write_text("{'loss': 0.75, 'learning_rate': 0.2, 'epoch': 0.2}\n")
    for path in (state, log):
        os.utime(path, (NOW - 6, NOW - 6))
    while not sweep.walks:
        sweep.look(moment(13.0))
    watch.look(moment(13.0))
    watch.look(moment(15.0))
    with log.open("a") as file:
        file.write("{'loss': 0.25, 'learning_rate': 0.3, 'epoch': 0.3}\n")
    watch.look(moment(17.0))
    watch.close(moment(18.0))
    points = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    booked = {point["loss"]: point["elapsed_s"] for point in points}
    assert booked[0.5] == 7.0 and booked[0.75] == 7.0
    assert booked[0.25] == 17.0
