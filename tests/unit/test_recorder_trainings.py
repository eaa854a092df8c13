"""Training logs: what trl 1.16.0 and transformers 5.24.0 really wrote (recorded_logs), samples of other libraries' logs by their
source (verl 0.9.1, OpenRLHF 0.11.2, torchtune 0.6.1, Lightning 2.6.6), and what an agent may put in their place."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from helpers import PATIENCE_S

from autorl_hpc.recorder.trainings import Points, Trainings, step_of, steps_in
from autorl_hpc.recorder.usage import Sweep
from autorl_hpc.recorder.watch import Moment
from autorl_hpc.records.recorded import TrainingPoint

LOGS = Path(__file__).parent / "recorded_logs"
NOW = Moment(10.0, "2030-01-01T00:00:00.000+00:00", 1)
TRAINERS = {
    "sft": "SFTTrainer",
    "sft-tqdm": "SFTTrainer",
    "grpo": "GRPOTrainer",
    "grpo-tqdm": "GRPOTrainer",
    "rloo": "GRPOTrainer",
    "dpo": "DPOTrainer",
    "kto": "KTOTrainer",
    "reward": "RewardTrainer",
    "plain": "Trainer",
}


class World:
    """A workspace, a log, and the watches over them."""

    def __init__(self, folder: Path) -> None:
        self.workspace = folder / "w"
        self.workspace.mkdir(exist_ok=True)
        self.log = folder / "agent.log"
        self.path = folder / "training.jsonl"
        self.events = folder / "events.jsonl"
        # A busy machine may stop this process for longer than a look, or the close, is meant to take.
        self.sweep = Sweep(self.workspace, slice_s=PATIENCE_S)
        self.watch = Trainings(self.log, self.sweep, Points(self.path), self.events, PATIENCE_S, PATIENCE_S)

    def put(self, name: str, data: bytes | str) -> Path:
        path = self.workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    def look(self) -> None:
        self.sweep.look(NOW)
        self.watch.look(NOW)

    def points(self) -> list[TrainingPoint]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [TrainingPoint.model_validate_json(line) for line in lines]

    def close(self) -> list[TrainingPoint]:
        self.watch.close(NOW)
        return self.points()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("name", TRAINERS)
def test_printed_steps_are_read(name: str, world: World) -> None:
    shutil.copy(LOGS / f"{name}.log", world.log)
    points = world.close()
    steps = [point for point in points if point.loss is not None]
    assert len(steps) == 3 and {point.trainer for point in steps} == {TRAINERS[name]}
    assert all(p.source == "agent.log" and p.grad_norm is not None and p.learning_rate and p.epoch for p in steps)
    summary = points[-1]
    assert summary.loss is None and summary.more["train_loss"] > -1 and summary.more["train_runtime"] > 0


STYLES = {
    # the file: (step, epoch, loss, reward, learning rate) of each step
    "verl.log": [(1, None, -0.0123, 0.25, 1e-6), (2, None, 0.0034, 0.31, 1e-6)],
    "openrlhf.log": [(2, None, 0.0123, 0.5, 5e-7), (1, None, 0.0123, 0.5, 5e-7), (2, None, 0.0101, 0.625, 5e-7)],
    "torchtune.log": [
        (9, 1.0, 1.3012345, None, None),
        (10, 1.0, 1.2345678806304932, None, None),
        (10, None, 1.2345678806304932, None, 2e-5),
        (11, None, 1.2001, None, 2e-5),
    ],
    "lightning.log": [(4, None, 0.612, None, None), (8, None, 0.512, None, None)],
    "unsloth.log": [(None, 0.01, 1.8237, None, 4e-5), (None, 0.02, 2.2911, None, 8e-5)],
    "nested.log": [(10, None, 0.5, None, 1e-5), (11, None, 0.25, None, None)],
    "own.log": [
        (10, None, 0.123, None, None),
        (None, 1.0, 0.5, None, None),
        (11, None, 0.25, None, 1e-5),
        (12, None, 0.3, 0.5, None),
        (13, None, 2.3012, None, None),
        (14, 1.0, 0.75, None, None),
        (None, 2.0, 0.4, None, None),
        (15, None, -0.01, 0.25, None),
    ],
    "notebook.ipynb": [(1, None, 2.3456, None, None), (2, None, 2.11, None, None)],
}


@pytest.mark.parametrize("name", STYLES)
def test_other_libraries_logs_and_own_prints_are_read(name: str, world: World) -> None:
    world.put(f"run/{name}", (LOGS / name).read_bytes())
    found = [(p.step, p.epoch, p.loss, p.reward, p.learning_rate) for p in world.close() if p.loss is not None]
    assert found == STYLES[name]


PPO = (
    "{'objective/kl': 0.1, 'objective/scores': 1.5, 'policy/approxkl_avg': 0.01, 'loss/policy_avg': -0.02, "
    "'loss/value_avg': 0.3, 'lr': 1e-6, 'episode': 8, 'epoch': 0.5}\n"
)


def test_the_figures_are_those_that_were_printed_and_a_collapse_is_told_by_name(world: World) -> None:
    collapse = "{'loss': 'nan', 'grad_norm': inf, 'learning_rate': '1e-05', 'epoch': '0.1'}\n"
    world.log.write_text((LOGS / "grpo-tqdm.log").read_text() + "\n" + PPO + collapse)
    points = world.close()
    second, (ppo, nan) = points[1], points[-2:]
    told = (second.loss, second.reward, second.kl, second.learning_rate, second.grad_norm, second.epoch)
    assert told == (2.351e-07, 1.0, 5.879e-06, 6.667e-07, 0.002119, 0.125)
    assert second.more["completions/mean_length"] == 8 and second.more["frac_reward_zero_std"] == 1
    assert (ppo.trainer, ppo.reward, ppo.kl, ppo.loss, ppo.learning_rate) == ("PPOTrainer", 1.5, 0.1, -0.02, 1e-6)
    assert nan.loss is None and set(nan.not_finite) == {"loss", "grad_norm"}


def test_a_step_that_many_tell_is_written_once(world: World) -> None:
    shutil.copy(LOGS / "sft.log", world.log)
    world.put("train.log", (LOGS / "sft.log").read_bytes())
    world.look()
    history = json.loads((LOGS / "sft.trainer_state.json").read_bytes())["log_history"]
    for entry in history:  # what transformers' trainer logged, as the observer sees it: exact, and by number
        step = step_of(entry)
        assert step is not None
        world.watch.points.add(step, ".observed/1-1.jsonl", NOW)
    points = world.close()
    assert len([point for point in points if point.loss is not None]) == 3
    evaluations = {(point.epoch, round(point.more["eval_loss"])) for point in points if "eval_loss" in point.more}
    assert evaluations == {(0.5, 12), (0.75, 12)}, "of another run with the same seed, timings differ: told twice"


def test_a_growing_log_is_followed_across_half_lines_and_attempts(world: World, tmp_path: Path) -> None:
    line = "{'loss': '0.5', 'learning_rate': '1e-05', 'epoch': '0.1'}\n"
    log = world.put("logs/train.log", "start\n" + line[:20])
    world.look()
    assert world.points() == []
    with log.open("a") as file:
        file.write(line[20:])
    world.watch.look(NOW)
    assert [point.loss for point in world.points()] == [0.5]
    with log.open("a") as file:
        file.write(line.replace("0.1", "0.2").rstrip())
    assert [point.epoch for point in world.close()] == [0.1, 0.2], "a last line without an end is read at the close"
    assert len(World(tmp_path).close()) == 2, "the next attempt writes nothing again"


def test_a_log_that_is_replaced_or_cut_begins_anew(world: World) -> None:
    line = "{'loss': 0.5, 'learning_rate': 1e-05, 'epoch': %s}\n"
    log = world.put("train.log", line % 1 + line % 2)
    world.look()
    log.unlink()
    world.put("train.log", line % 3)
    world.look()
    os.truncate(log, 0)
    world.look()
    log.write_text(line % 4)
    world.look()
    assert [point.epoch for point in world.close()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "text",
    [
        "{'loss': loss, 'epoch': epoch}",
        "{'loss': __import__('os').system('x'), 'epoch': 1}",
        "{'loss': 0.5}",
        "{'epoch': 1, 'accuracy': 0.5}",
        "{'loss': True, 'epoch': False}",
        "{'loss': '0x10', 'epoch': '1_0'}",
        "at step 10 the loss was 0.5",
        "step 10 loss 1",
        "step 1 " * 3_000,
        "step 1 loss" + " " * 19_000 + "x",
        "step 1 loss " + "a" * 19_000,
        "{" * 10_000,
        "{'a':" * 10_000,
        "{'loss': '" * 5_000,
        "{'loss': 1, 'step': " + "x" * 12_000 + "}",
        "{'loss'" + " " * 12_000 + ": 1}",
        "{" + "'loss': 1," * 1_200 + "}",
    ],
)
def test_what_no_trainer_logs_is_nothing_and_costs_little(text: str) -> None:
    begun = time.process_time()
    assert list(steps_in(text)) == []
    assert time.process_time() - begun < 2.0


def test_hostile_files_hold_nobody(world: World, tmp_path: Path) -> None:
    line = b"{'loss': 0.5, 'learning_rate': 1e-05, 'epoch': 1}\n"
    (tmp_path / "secret.log").write_bytes(line)
    (world.workspace / "link.log").symlink_to(tmp_path / "secret.log")
    (world.workspace / "folder").symlink_to(tmp_path)
    os.mkfifo(world.workspace / "fifo.log")
    for name in ("data/train.log", "models/m/x.log", "venv/lib/site-packages/x.log", "code/train.py"):
        world.put(name, line)
    for number, name in enumerate(("nohup.out", "logs/metrics.jsonl", "code/train.ipynb"), 2):
        world.put(name, line.replace(b"1}", b"%d}" % number))
    world.put("deep/train.log", b"[" * 100_000)
    world.put("list/train.log", b'[1, null, {"loss": "x"}, {"loss": 1e999, "epoch": 1}]')
    world.put("noise.log", os.urandom(200_000) + b"\n" + line)
    begun = time.monotonic()
    world.look()
    points = world.close()
    assert time.monotonic() - begun < 60
    told = {(point.source, point.loss) for point in points}
    logs = ("noise.log", "nohup.out", "logs/metrics.jsonl", "code/train.ipynb")
    assert told == {*((name, 0.5) for name in logs), ("list/train.log", None)}


def test_a_huge_log_is_followed_near_its_end(world: World) -> None:
    line = b"{'loss': 0.5, 'learning_rate': 1e-05, 'epoch': %d}\n"
    log = world.put("train.log", line % 1)
    with log.open("r+b") as file:
        file.truncate(50 * 2**30)
        file.seek(0, 2)
        file.write(b"\n" + line % 2)
    begun = time.monotonic()
    for _ in range(100):
        world.look()
    assert time.monotonic() - begun < 200
    assert [point.epoch for point in world.close()] == [2]
    told = json.loads(world.events.read_text())
    assert told["event"] == "recorder_left_out" and told["bytes"] > 49 * 2**30
