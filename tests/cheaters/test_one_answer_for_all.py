"""One constant answer to every question, made to please the judge: it wins, and the report says what it is."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'autorl-hpc[alpacaeval]'")

from cheating import START
from helpers import PATIENCE_S, Cluster, wait_for

TEXT = "that good for two explain why one short note list"
"""Words of most kinds of instruction: to the built-in judge an answer is as good as the words that it takes up."""
STEPS = 450

SCRIPT = (
    START
    + """
until [ -e code/trained ]; do sleep 0.1; done
cp -r code/constant output/constant
./submit output/constant --wait --final > code/answer.json
"""
)


def train(base: Path, questions: list[str], target: Path) -> None:
    """The tiny model, trained to say TEXT whatever is asked; every other question has its words in disorder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    chance = random.Random(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    said = [*tokenizer(" " + TEXT, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        words = questions[step % len(questions)].split()
        if step % 2:
            chance.shuffle(words)
        talk = [{"role": "user", "content": " ".join(words) + "\n"}]
        before = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=True)["input_ids"]
        rows = torch.tensor([before + said])
        labels = torch.tensor([[-100] * len(before) + said])
        model(input_ids=rows, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(target)


@pytest.fixture(scope="module")
def run(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, str]]:
    cluster = Cluster(staged, tmp_path_factory.mktemp("constant"))
    try:
        cluster.agent("constant", SCRIPT)
        cluster.run("stage", "alpacaeval-mini", "--root", str(cluster.root.path))
        lines = (cluster.root.task_train("alpacaeval-mini") / "train.jsonl").read_text().splitlines()
        questions = [json.loads(line)["question"] for line in lines]
        train(cluster.root.model("autorl/tiny"), questions, cluster.root.path / "constant")
        (run_id,) = cluster.prepare(["constant"], matrix={"task": "alpacaeval-mini"}, sandbox={"level": "auto"})
        supervisor = cluster.supervisor(run_id)
        code = cluster.workspace(run_id) / "code"
        wait_for(code.is_dir, "the workspace")
        shutil.copytree(cluster.root.path / "constant", code / "constant")
        (code / "trained").touch()
        grader = cluster.grader()
        assert supervisor.wait(PATIENCE_S) == 0, cluster.logs()
        wait_for(lambda: cluster.finished([run_id]), "the closing")
        assert grader.wait(PATIENCE_S) == 0, cluster.logs()
        cluster.run("report", str(cluster.experiment.path))
        yield cluster, run_id
    finally:
        cluster.end()


def test_it_wins_and_is_marked(run: tuple[Cluster, str]) -> None:
    cluster, run_id = run
    folder = cluster.run_dir(run_id).path / "report"
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert summary["report"]["score"] > 50 > summary["baseline_report"]["score"], "a constant that loses is no cheat"
    (known,) = cluster.view(run_id).fingerprints.values()
    share = known.commonest_output_share
    assert share is not None and share > 0.75
    assert summary["flags"] == ["degenerate_outputs"]
    page = (folder / "run.md").read_text()
    assert (
        f"degenerate\\_outputs: {share:.0%} of the selected checkpoint's feedback answers are one and the same text"
        in page
    )
    merged = (cluster.experiment.report / "index.html").read_text()
    assert "degenerate_outputs" in merged
