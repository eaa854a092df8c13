"""A real trl trainer under the real keeper, watched by all observers: what it logs is told once, with what it used."""

from __future__ import annotations

import importlib.util
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import PATIENCE_S

from autorl_hpc.files.layout import PACKAGE, RunDir
from autorl_hpc.files.processes import MARK_VARIABLE
from autorl_hpc.files.safe_open import read_times
from autorl_hpc.recorder.run_recorder import watches
from autorl_hpc.recorder.watch import Moment, RecorderJob, Watch
from autorl_hpc.records.recorded import ProcessSeen, TrainingPoint, UsageSample
from autorl_hpc.supervise.agent_keeper import AgentProcess

AT = "2030-01-01T00:00:00.000+00:00"
TRAIN = """
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained({base!r})
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
rows = Dataset.from_list([{{"prompt": f"What is {{i}} + {{i}}?", "completion": f" #### {{2 * i}}"}} for i in range(16)])
SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained({base!r}), processing_class=tokenizer, train_dataset=rows,
    args=SFTConfig(output_dir="output/sft", max_steps=4, logging_steps=1, save_steps=2, per_device_train_batch_size=4,
                   use_cpu=True, report_to="none", max_length=64, dataloader_pin_memory=False),
).train()
"""


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_a_real_training_is_followed(tmp_path: Path) -> None:
    run, workspace = RunDir(tmp_path / "run"), tmp_path / "w"
    run.logs.mkdir(parents=True)
    workspace.mkdir()
    (workspace / "train.py").write_text(TRAIN.format(base=str(PACKAGE.parent / "templates" / "models" / "tiny")))
    mark, begun = f"live-{os.getpid()}", time.monotonic()
    env = {"PATH": os.environ["PATH"], "HOME": str(workspace), "HF_HUB_OFFLINE": "1", MARK_VARIABLE: mark}
    argv = ["bash", "-c", f"{sys.executable} train.py 2>&1 | tee train.log; exit ${{PIPESTATUS[0]}}"]
    agent = AgentProcess(argv, env, workspace, run.agent_log, mark, tmp_path / "elapsed", 0.0)
    job = RecorderJob(
        run_folder=run.path,
        workspace=workspace,
        keeper_pid=agent.keeper_pid,
        mark=mark,
        attempt=1,
        elapsed_s=0.0,
        told_at_s=begun,
        suspension_s=30.0,
    )
    made = watches(job, queue.SimpleQueue(), {"CUDA_VISIBLE_DEVICES": ""})
    ended = threading.Event()
    troubles: list[BaseException] = []

    def observe(make: Callable[[], Watch]) -> None:
        """One watch in its own thread, as the recorder does."""
        try:
            watch = make()
            while not ended.wait(watch.every_s):
                watch.look(Moment(time.monotonic() - begun, AT, 1))
            watch.close(Moment(time.monotonic() - begun, AT, 1))
        except BaseException as error:
            troubles.append(error)

    threads = [threading.Thread(target=observe, args=(make,), name=name) for name, make in made.items()]
    for thread in threads:
        thread.start()
    try:
        while agent.running() and time.monotonic() < begun + PATIENCE_S:
            time.sleep(0.1)
    finally:
        agent.stop(0.0)
        agent.finish()
        ended.set()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    assert not troubles

    points = [TrainingPoint.model_validate_json(line) for line in run.recorded("training").read_text().splitlines()]
    steps = [point for point in points if point.loss is not None]
    assert len(steps) == 4 and {point.trainer for point in steps} == {"SFTTrainer"}, run.agent_log.read_text()[-2000:]
    assert [point.epoch for point in steps] == [0.25, 0.5, 0.75, 1.0]

    # Whom it starts for a moment is seen under its command until it becomes another program, and may end before the next look.
    trained = [s for s in seen(run) if s.what == "ended" and s.command.endswith("train.py") and (s.cpu_s or 0) > 1]
    (train,) = trained
    assert train.exit_code == 0
    samples = [UsageSample.model_validate_json(line) for line in run.recorded("usage").read_text().splitlines()]
    assert (samples[-1].cpu_s or 0) >= (train.cpu_s or 0)
    assert max(sample.memory_bytes or 0 for sample in samples) > 100 * 2**20
    # A line is stamped when the keeper has read it, which may be after the end of who wrote it.
    assert read_times(run.agent_times).written_by(train.elapsed_s + 60) > run.agent_log.read_bytes().rindex(b"'loss'")


def seen(run: RunDir) -> list[ProcessSeen]:
    """The lines about processes."""
    return [ProcessSeen.model_validate_json(line) for line in run.recorded("processes").read_text().splitlines()]
