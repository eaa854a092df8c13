"""Records of many kinds."""

from __future__ import annotations

from typing import Any

from autorl_hpc.agents import AgentFile
from autorl_hpc.records import cluster, entries, exchange, experiment, recorded, run, task
from autorl_hpc.records.base import Strict
from autorl_hpc.states import EndedBy, EntryKind, Network, Protocol, SandboxLevel, Split

HASH = "0123456789abcdef" * 4

RECIPE = task.Recipe(
    **{"name": "default", "version": 1, "prompt": "{question}", "scorer": "gsm8k", "scorer_version": "1"},
    sampling=task.Sampling(max_new_tokens=32, stop=("\n",)),
)
PIN = task.SplitPin(n=3, sha256=HASH)
SCIENCE = run.Science(
    task="arithmetic",
    agent="null",
    driver="none",
    base_model="autorl/tiny",
    mode="free",
    seed=3,
    budget=experiment.Budget(wall_clock_s=60.0),
    protocol=Protocol.TWO_SPLIT,
    recipe=RECIPE,
    splits={"feedback": PIN, "report": PIN},
    base_model_content_hash=HASH,
)
SPEC = experiment.ExperimentSpec(
    name="exp",
    matrix=experiment.Matrix(task=("arithmetic",), agent=("null", "sft"), base_model=("autorl/tiny",), seed=(0, 1)),
    exclude=({"agent": "sft", "seed": [1]},),
    budget=experiment.Budget(wall_clock_s=90.0),
    recipe={"arithmetic": "default"},
)
SEEN: dict[str, Any] = {"elapsed_s": 12.0, "at": "2026-01-01T00:00:00.000+00:00"}
EVALUATION = entries.Evaluation(
    split=Split.FEEDBACK, content_hash=HASH, score=12.5, n=8, correct=1, recipe_hash=HASH, engine_hash=HASH
)
RECORDS: list[Strict] = [
    exchange.Manifest(model_path="output/v1 é 漢", id="v1", note="a note", final=True),
    SPEC,
    run.RunRecord(
        run_id=SCIENCE.run_id(),
        experiment="exp",
        index=0,
        science=SCIENCE,
        recipe_hash=RECIPE.hash(),
        task_hash=HASH,
        agent_hash=HASH,
        code_hash=HASH,
        created_at="2026-01-01T00:00:00.000+00:00",
    ),
    cluster.ClusterProfile(
        name="site",
        partition="gpu",
        setup="source x\nexport Y=1",
        sbatch={"mail-type": "END", "exclusive": True},
        container=cluster.Container(image="$HOME/a.sif"),
        limits=cluster.Limits(max_time="2d"),
        agent=cluster.JobKind(gpus=2, memory="64G"),
    ),
    entries.Entry(
        seq=1,
        prev=HASH,
        kind=EntryKind.SCORE,
        at="now",
        writer=entries.Writer(role="grader", host="node1", pid=1),
        body={"a": [1, 2.5, None, {"b": True}]},
    ),
    entries.Submission(
        submission_id=1,
        manifest_id="v1",
        status="accepted",
        model_path="output/v1",
        elapsed_s=0.1 + 0.2,
        content_hash=HASH,
        ignored_files=("optimizer.pt", "logs/"),
    ),
    entries.SandboxUsed(attempt=1, level=SandboxLevel.BWRAP, network=Network.NONE, refused={"apptainer": "no"}),
    entries.Contamination(
        submission_id=3,
        also=(2,),
        items={Split.FEEDBACK: 0, Split.REPORT: 2},
        whole={Split.FEEDBACK: 0, Split.REPORT: 1},
        of={Split.FEEDBACK: 300, Split.REPORT: 500},
        found=(entries.Contaminated(file="code/x.py", split=Split.REPORT, how="ngram", items=2, first_items=("r-1",)),),
        complete=False,
    ),
    entries.Sealed(
        submissions=(),
        ended_by=EndedBy.TOKENS,
        exit_code=None,
        elapsed_s=60.0,
        given_back_s=1.0,
        gpu_hours=0.5,
        driver=entries.DriverUse(tokens_in=10, tokens_out=1, tokens_cached=4, cost_usd=0.25, calls=1, refused=2),
        exit_codes=(0, None),
        reprompts=1,
    ),
    exchange.Heartbeat(grader="g", host="node1", pid=1, counter=10**12, state="idle"),
    exchange.Clock(
        attempt=2,
        elapsed_s=60.0,
        gpus=2,
        gpu_s=120.0,
        progress=exchange.Progress(
            exit_codes=(None, 0),
            warnings=(exchange.BudgetWarning(budget="tokens", percent=100, elapsed_s=59.5, says="used up"),),
            out_of=EndedBy.TOKENS,
            out_at_s=59.5,
        ),
        host="node1",
        pid=1,
    ),
    exchange.Baseline(
        key=HASH,
        task="arithmetic",
        base_model="autorl/tiny",
        evaluation=EVALUATION,
        repeat_score=12.0,
        engine=exchange.Engine(backend="transformers", versions={"torch": "2"}, device="cpu", dtype="float32"),
        grader="g",
    ),
    exchange.BundleManifest(
        parts=(
            exchange.BundlePart(name="autorl/tiny", kind="model", content_hash=HASH),
            exchange.BundlePart(name="torch", kind="environment", environment=exchange.EnvironmentFacts(kind="venv")),
        ),
        files=(exchange.StoreFile(path="store/models/autorl/tiny/config.json", sha256=HASH, size_bytes=1),),
    ),
    task.TaskFile(
        name="t",
        title="T",
        source="s",
        licence="MIT",
        sources=(task.SourceFile(file="a.jsonl", sha256=HASH),),
        train_files={"train/a": HASH},
        splits={"feedback": PIN, "report": PIN},
        recipes=(RECIPE,),
    ),
    AgentFile(name="a", description="d", include=("scripted",), needs=("torch",), trace="codex"),
    recorded.TrainingPoint(**SEEN, source="agent.log", step=5, reward=0.5, more={"entropy": 0.1}),
    recorded.ObservedFact(**SEEN, pid=7, program="code/train.py", at_s=1.5, what="seed", facts={"value": 3}),
]


def named(record: Strict) -> str:
    return type(record).__name__
