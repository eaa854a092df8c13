"""What the recorder leaves beside a run of treemaker (lines through their records, code through the real repository), and a run with
all of it, told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from treemaker import CREATED, Tree, TreeRun, outcomes

from autorl_hpc.files.queue import append_event
from autorl_hpc.recorder.code import FILE, Repository
from autorl_hpc.recorder.watch import LineWriter
from autorl_hpc.records.recorded import (
    CodeRevision,
    GpuSample,
    ProcessSeen,
    Seen,
    TraceEvent,
    TrainingPoint,
    UsageSample,
)
from autorl_hpc.report.run_summary import digest
from autorl_hpc.report.summary import RunSummary


def add(run: TreeRun, name: str, *records: Seen) -> None:
    """Appends records to one of the recorder's files."""
    lines = LineWriter(run.dir.recorded(name))
    lines.add(*records)
    lines.close()


def usage(at_s: float, cpu_s: float | None = None, gpus: tuple[float | None, ...] = (), **more: Any) -> UsageSample:
    """A sample; `gpus`: the share of the time that each was used."""
    seen = tuple(GpuSample(index=i, name="H100", used_share=share) for i, share in enumerate(gpus))
    return UsageSample(elapsed_s=at_s, at=CREATED, cpu_s=cpu_s, gpus=seen, **more)


def event(at_s: float, kind: str, **more: Any) -> TraceEvent:
    """An event of a trace."""
    fields = {"source": "agent.log", "offset": 0, "format": "claude-code", **more}
    return TraceEvent.model_validate({"elapsed_s": at_s, "at": CREATED, "kind": kind, **fields})


def point(at_s: float, step: int | None = None, **more: Any) -> TrainingPoint:
    """A logged step."""
    fields = {"source": "output/trainer_state.json", **more}
    return TrainingPoint(elapsed_s=at_s, at=CREATED, step=step, **fields)


def process(at_s: float, command: str, what: str = "began", **more: Any) -> ProcessSeen:
    """A process that begins or ends."""
    fields = {"pid": 7, "parent": 1, "began_s": min(at_s, more.pop("began_s", at_s)), **more}
    return ProcessSeen.model_validate({"elapsed_s": at_s, "at": CREATED, "command": command, "what": what, **fields})


def code(run: TreeRun, at_s: float, files: dict[str, str], submission_id: int | None = None) -> str:
    """A state of the agent's code, committed and told; returns its revision. Paths are relative to the workspace."""
    repository = Repository.create(run.dir.code_git)
    parent = repository.head()
    entries = {path.encode(): (FILE, repository.write("blob", text.encode())) for path, text in files.items()}
    revision = repository.commit(repository.write_files(entries), parent, "state", 0)
    repository.set_ref("main", revision)
    told = CodeRevision(
        elapsed_s=at_s, at=CREATED, revision=revision, parent=parent, submission_id=submission_id, files=len(files)
    )
    add(run, "revisions", told)
    return revision


KEY = "hf_" + "abcdefghij" * 3
SFT = f"""import os
from trl import SFTConfig, SFTTrainer
os.environ["HF_TOKEN"] = "{KEY}"
args = SFTConfig(output_dir="output/v1", learning_rate=2e-5, num_train_epochs=1)
trainer = SFTTrainer(model=os.environ["MODEL_PATH"], args=args, train_dataset=data)
trainer.train()
"""


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "runs" / "exp")


def told(run: TreeRun) -> RunSummary:
    return digest(run.dir)


def recorded_run(tree: Tree) -> TreeRun:
    """Three submissions: refused, 12 of 40, 20 of 40 (the base model solves 10); one GPU, two calls of the driver."""
    run = tree.run(agent="codex", driver="gpt-x", mode="sft-only").start()
    append_event(run.dir.events, "agent_started", attempt=1, elapsed_s=0.0)
    run.dir.agent_log.write_text("hello\n")
    first = code(run, 40.0, {"code/train.py": SFT, "code/old.py": "x = 1\n"})
    run.refuse(50.0, "no config.json", code_revision=first)
    second = code(run, 90.0, {"code/train.py": SFT.replace("2e-5", "1e-5")})
    run.submit(100.0, outcomes(40, range(12)), code_revision=second)
    code(run, 300.0, {"code/train.py": SFT.replace("2e-5", "5e-6")})  # not told by the submission: found by time
    run.submit(400.0, outcomes(40, range(5, 25)))
    add(run, "training", *(point(60.0 + i, i, trainer="SFTTrainer", loss=3.0 - i) for i in range(1, 3)))
    add(run, "training", point(200.0, 9, trainer="SFTTrainer", loss=0.5, source="output/v2/log"))
    add(
        run,
        "trace",
        event(10.0, "usage", tokens_in=1000, tokens_out=50, cost_usd=0.25, model="gpt-x"),
        event(150.0, "usage", tokens_in=2000, tokens_out=70, cost_usd=0.5),
        event(151.0, "tool_call", tool="shell", command="python code/train.py", call_id="1"),
        event(190.0, "tool_result", call_id="1", ok=True),
    )
    add(run, "usage", usage(5.0, 1.0, (0.5,)), usage(10.0, 6.0, (0.7,), memory_bytes=9))
    add(run, "processes", process(55.0, "python code/train.py"))
    add(run, "processes", process(99.0, "python code/train.py", "ended", exit_code=1))
    return run
