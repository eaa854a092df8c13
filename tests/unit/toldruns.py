"""A run with everything that a recorder leaves, and what is told of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import recordmaker as make
from treemaker import Tree, TreeRun, outcomes

from autorl_hpc.files.queue import append_event
from autorl_hpc.report.run_summary import Library, digest
from autorl_hpc.report.summary import RunSummary

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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TreeRun:
    """`recorded_run`, sealed and closed: to be read alone."""
    tree = Tree(tmp_path_factory.mktemp("whole") / "runs" / "exp")
    return recorded_run(tree).seal(600.0).close(outcomes(100, range(45)))


def told(run: TreeRun) -> RunSummary:
    return digest(run.dir, Library())


def recorded_run(tree: Tree) -> TreeRun:
    """Three submissions: refused, 12 of 40, 20 of 40 (the base model solves 10); one GPU, two calls of the driver."""
    run = tree.run(agent="codex", driver="gpt-x", mode="sft-only").start()
    append_event(run.dir.events, "agent_started", attempt=1, elapsed_s=0.0)
    run.dir.agent_log.write_text("hello\n")
    first = make.code(run, 40.0, {"code/train.py": SFT, "code/old.py": "x = 1\n"})
    run.refuse(50.0, "no config.json", code_revision=first)
    second = make.code(run, 90.0, {"code/train.py": SFT.replace("2e-5", "1e-5")})
    run.submit(100.0, outcomes(40, range(12)), code_revision=second)
    make.code(run, 300.0, {"code/train.py": SFT.replace("2e-5", "5e-6")})  # not told by the submission: found by time
    run.submit(400.0, outcomes(40, range(5, 25)))
    make.add(run, "training", *(make.point(60.0 + i, i, trainer="SFTTrainer", loss=3.0 - i) for i in range(1, 3)))
    make.add(run, "training", make.point(200.0, 9, trainer="SFTTrainer", loss=0.5, source="output/v2/log"))
    make.add(
        run,
        "trace",
        make.event(10.0, "usage", tokens_in=1000, tokens_out=50, cost_usd=0.25, model="gpt-x"),
        make.event(150.0, "usage", tokens_in=2000, tokens_out=70, cost_usd=0.5),
        make.event(151.0, "tool_call", tool="shell", command="python code/train.py", call_id="1"),
        make.event(190.0, "tool_result", call_id="1", ok=True),
    )
    make.add(run, "usage", make.usage(5.0, 1.0, (0.5,)), make.usage(10.0, 6.0, (0.7,), memory_bytes=9))
    make.add(run, "processes", make.process(55.0, "python code/train.py"))
    make.add(run, "processes", make.process(99.0, "python code/train.py", "ended", exit_code=1))
    return run
