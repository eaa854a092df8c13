"""alfworld-mini through the whole of the grader: bench, real graders, and what an agent finds in its workspace."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import science_of
from helpers import PATIENCE_S, VARIANTS, Cluster
from players import Player, walkthroughs

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root
from autorl_hpc.grading.attempts import Attempts, ClusterTrouble, EvaluationRequest
from autorl_hpc.grading.evaluate import Bench, Scored
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.records.run import Science
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.states import Fault, Split
from autorl_hpc.tasks.heldout import Item, load_items
from autorl_hpc.tasks.loader import PATH_VARIABLE, load_task, with_environment_hash

TASK = "alfworld-mini"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path / "root")
    made.path.mkdir()
    stage_task(made, load_task(TASK), None)
    return made


def science(task: str = TASK) -> Science:
    return science_of(load_task(task))


class PlayedBench(Bench):
    """A bench whose engine plays by a plan."""

    def __init__(self, root: Root, player: Player) -> None:
        super().__init__(root, GraderSpec(device="cpu"))
        self.player = player

    def engine(self, science: Any) -> Player:
        return self.player


def goals_of(root: Root, split: Split, task: str = TASK) -> list[dict[str, Any]]:
    items: Sequence[Item] = load_items(root, task, split, load_task(task).file.splits[split.value])  # type: ignore[index]
    return [{**item.data, "id": item.id, "question": item.question} for item in items]


def scored(root: Root, player: Player, split: Split, **options: Any) -> Scored:
    bench = PlayedBench(root, player)
    try:
        return bench.rate(bench.answer(science(), root.path, "0" * 64, split, **options))
    finally:
        bench._playground.close()


@pytest.mark.parametrize("split", [Split.FEEDBACK, Split.REPORT])
def test_the_oracle_wins_all_and_nothing_wins_nothing(root: Root, split: Split) -> None:
    goals = goals_of(root, split)
    won = scored(root, walkthroughs(goals), split)
    assert (won.evaluation.score, won.evaluation.n, won.evaluation.correct) == (100.0, 8, 8)
    assert won.evaluation.metrics["average_reward"] == 1.0
    assert [o.id for o in won.outcomes] == [goal["id"] for goal in goals]
    clusters = [goal["cluster"] for goal in goals]
    assert [o.facts["cluster"] for o in won.outcomes] == clusters
    assert won.evaluation.metrics["item_clusters"] == len(set(clusters)) <= 8
    assert won.evaluation.clusters == (len(set(clusters)) if len(set(clusters)) < 8 else None)
    assert [o.facts["steps"] for o in won.outcomes] == [len(goal["walkthrough"]) for goal in goals]
    for nothing in ("", "look", "think: hm", "go to nowhere 1", "\ud800".encode("utf-8", "replace").decode()):
        lost = scored(root, Player(lambda prompt, said=nothing: said), split)  # type: ignore[misc]
        assert (lost.evaluation.score, lost.evaluation.correct) == (0.0, 0)
        assert {o.facts["steps"] for o in lost.outcomes} == {12.0}


def broken_task(tmp_path: Path, root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """`alfworld-mini` with an environment that is killed in the midst of each episode."""
    folder = tmp_path / "tasks" / TASK
    shutil.copytree(load_task(TASK).folder, folder)
    path = folder / "environment.py"
    path.write_text(
        path.read_text()
        + "\n\nEnvironment.step = lambda self, action: __import__('os').kill(__import__('os').getpid(), 9)\n"
    )
    monkeypatch.setenv(PATH_VARIABLE, str(folder.parent))


def test_attempts_blame_no_artifact_for_it(root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_task(tmp_path, root, monkeypatch)
    experiment = root.experiment("exp")
    artifact = experiment.artifacts / ("0" * 64)
    artifact.mkdir(parents=True)
    monkeypatch.setattr("autorl_hpc.files.artifacts.artifact_ready", lambda *_: True)
    attempts = Attempts(experiment, PlayedBench(root, Player(lambda prompt: "look")))
    with pytest.raises(ClusterTrouble, match="the environment of task alfworld-mini failed"):
        attempts.evaluate(EvaluationRequest(science(), "0" * 64, Split.FEEDBACK, tmp_path / "items.jsonl.gz", "entry"))
    assert not (tmp_path / "items.jsonl.gz").exists()


def changed_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> Path:
    folder = tmp_path / "changed" / TASK
    shutil.copytree(load_task(TASK).folder, folder)
    path = folder / "environment.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    monkeypatch.setenv(PATH_VARIABLE, str(folder.parent))
    return folder


def test_another_environment_or_another_room_is_another_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_task(TASK)
    plain = with_environment_hash(task.file.recipes[0], task)
    assert plain.hash() == with_environment_hash(task.file.recipes[0], task).hash() != task.file.recipes[0].hash()
    folder = changed_task(tmp_path, monkeypatch, "class Environment", "EASIER = True\n\n\nclass Environment")
    other = load_task(TASK)
    assert other.folder == folder
    assert with_environment_hash(other.file.recipes[0], other).hash() != plain.hash()
    monkeypatch.delenv(PATH_VARIABLE)
    monkeypatch.setattr("autorl_hpc.tasks.loader.rollouts_sha256", lambda: "1" * 64)
    assert with_environment_hash(task.file.recipes[0], task).hash() != plain.hash()


def test_an_environment_changed_after_launch_scores_nothing(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = science()
    launched = launched.model_copy(update={"recipe": with_environment_hash(launched.recipe, load_task(TASK))})
    changed_task(tmp_path, monkeypatch, "class Environment", "EASIER = True\n\n\nclass Environment")
    bench = PlayedBench(root, Player(lambda prompt: "look"))
    with pytest.raises(AutorlError, match="is not the one that this run was launched with") as caught:
        bench.answer(launched, root.path, "0" * 64, Split.FEEDBACK)
    assert caught.value.fault is Fault.CLUSTER


@pytest.mark.parametrize("damage", ["changed", "cut off", "gone"])
def test_a_vault_file_changed_after_staging_is_named_and_scores_nothing(tmp_path: Path, damage: str) -> None:
    name = "webshop-mini"
    made = Root(tmp_path / "shop")
    made.path.mkdir()
    stage_task(made, load_task(name), None)
    path = made.task_vault(name) / "catalogue.jsonl"
    path.chmod(0o600)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"warm", b"cold") if damage == "changed" else whole[:500])
    if damage == "gone":
        path.unlink()
    bench = PlayedBench(made, Player(lambda prompt: "look"))
    with pytest.raises(AutorlError, match=rf"catalogue\.jsonl of task {name}") as caught:
        bench.rate(bench.answer(science(name), made.path, "0" * 64, Split.FEEDBACK, limit=1))
    assert caught.value.fault is Fault.CLUSTER and caught.value.where == str(path)
    path.write_bytes(whole)
    assert bench.rate(bench.answer(science(name), made.path, "0" * 64, Split.FEEDBACK, limit=1)).evaluation.score == 0.0
    bench._playground.close()


SEES_AND_SUBMITS = (
    '#!/usr/bin/env bash\nset -e\ncd "$WORKSPACE"\n'
    + VARIANTS
    + """cd code
cat > plays.py <<'END'
import json, os, sys
from autorl_rollouts.engine import Answer
from autorl_rollouts.episodes import run_episodes
from autorl_rollouts.source import Source

goals = [json.loads(line) for line in open(os.environ["DATA_PATH"] + "/train.jsonl")]
plans = {"Your task is to: " + goal["question"]: goal["walkthrough"] for goal in goals}


class Oracle:
    said = {}

    def encode(self, text):
        return list(text.encode())

    def chat(self, messages):
        return None

    def generate(self, prompts, sampling, seed):
        return [Answer(self.act(bytes(prompt).decode()), 1, False) for prompt in prompts]

    def act(self, prompt):
        task = next(task for task in plans if task in prompt)
        self.said[task] = self.said.get(task, -1) + 1
        return plans[task][self.said[task]]


source = Source(os.environ["WORKSPACE"] + "/environment/environment.py", "Environment", os.environ["DATA_PATH"])
episodes = run_episodes(Oracle(), goals, source, None, max_steps=12)
suite = [name for name in sys.modules if name.split(".")[0] == "autorl_hpc"]
json.dump({"rewards": [e.reward for e in episodes], "suite": suite}, open("../output/played.json", "w"))
END
python3 plays.py
cd ..
variants 0 1
./submit output/v0
"""
)


def test_a_run_is_scored_by_a_real_grader_and_its_agent_plays_for_itself(cluster: Cluster) -> None:
    cluster.run("stage", TASK, "--root", str(cluster.root.path))
    run_id = cluster.sealed_run(SEES_AND_SUBMITS, matrix={"task": TASK})
    workspace = cluster.workspace(run_id)
    played = json.loads((workspace / "output" / "played.json").read_text())
    assert played == {"rewards": [1.0] * 8, "suite": []}
    assert cluster.grader().wait(PATIENCE_S) == 0, cluster.logs()
    view = cluster.view(run_id)
    assert view.closed is not None
    (score,) = view.scores.values()
    assert score.evaluation.score == 0.0 and score.evaluation.n == 8 and score.evaluation.fault is None
    names = {"average_reward", "success_at_1", "success_at_half", "mean_steps", "item_clusters"}
    assert set(score.evaluation.metrics) == names
    assert score.evaluation.truncated > 0, "the tiny model never ends a line"
    (items,) = cluster.run_dir(run_id).items.glob("000001.feedback.jsonl.gz")
    lines = [json.loads(line) for line in gzip.decompress(items.read_bytes()).splitlines()]
    assert len(lines) == 8 and all(
        line["facts"] == {"reward": 0.0, "steps": 12.0, "cluster": line["facts"]["cluster"]} for line in lines
    )
    assert all(line["tokens"] > 0 for line in lines)
    assert "walkthrough" not in json.dumps(lines)
    held_out = [*goals_of(cluster.root, Split.FEEDBACK), *goals_of(cluster.root, Split.REPORT)]
    assert len(held_out) == 16
    for path in workspace.rglob("*"):
        if path.is_file() and path.suffix in (".py", ".json", ".jsonl", ".md"):
            text = path.read_text(errors="replace")
            assert not any(goal["id"] in text for goal in held_out), f"{path} names a held-out goal"
    text = (workspace / "instructions.md").read_text()
    assert "By episodes of at most 12 actions, each at most 24 new tokens; greedy." in text and "$" not in text.replace(
        "$MODEL_PATH", ""
    ).replace("$DATA_PATH", "").replace("$OUTPUT_DIR", "").replace("$GRADING_SERVER_URL", "")
    meta = json.loads((workspace / "run_meta.json").read_text())
    assert (meta["recipe"]["max_steps"], meta["recipe"]["stop"]) == (12, ["\n"])
