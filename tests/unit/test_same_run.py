"""The same run under several names: what only one run can have is named by report and verify, and unranks; honest runs that only look
alike rank on. And weights that came with the agent, and a gain without a training."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordmaker import add, point, process
from safetensors.numpy import save
from treemaker import RECIPE, Tree, TreeRun, evaluation, outcomes, sha, write_items
from typer.testing import CliRunner

from autorl_hpc.cli import app
from autorl_hpc.evidence.rescore import marked_runs
from autorl_hpc.evidence.verify import name_same_runs, verify_run
from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.files.layout import Root
from autorl_hpc.files.ledger import Ledger, sha256_hex
from autorl_hpc.grading.evaluate import ItemOutcome
from autorl_hpc.records import canonical_json
from autorl_hpc.records.entries import Closed
from autorl_hpc.report import report
from autorl_hpc.report.summary import MergedReport
from autorl_hpc.states import EntryKind, Split

Alter = Callable[[dict[str, Any], int], None]
SEEDS = (11, 12, 13, 14)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def lucky(
    tree: Tree, seed: int = 0, wrong: str = "wrong", name: str = "m", tokens: int = 3, same: int = 0, **more: Any
) -> TreeRun:
    """A run with times as a clock gives them, and with wrong answers that no other model gives (`wrong`), or one for all ('').

    `same`: so many of the 40 wrong texts are those of every other such run.
    """
    run = tree.run(seed=seed, **more).start()
    drawn = 0.1234567891 * (seed + 1) + 0.01 * len(name)
    content = sha(f"{name}-{seed}")
    run.submit(100.0 + drawn, outcomes(40, range(20)), content_hash=content, intake_s=1.0 + drawn)
    run.seal(600.0 + drawn)
    values = outcomes(100, range(60))
    texts = [
        f"{wrong}{seed if i - 60 >= same else ''}-{i}" if wrong and v < 1 else f"right-{i}" if v == 1 else "none"
        for i, v in enumerate(values)
    ]
    rows = [
        ItemOutcome(id=f"q{i}", outcome=v, output_sha256=sha(texts[i]), tokens=tokens, facts={})
        for i, v in enumerate(values)
    ]
    items = write_items(run.dir.items / "000001.report.jsonl.gz", rows)
    closing = evaluation(Split.REPORT, content, values, items)
    base = tree.baseline(run.science, Split.REPORT)
    body = Closed(selected=1, selected_by="best_feedback", report=closing, baseline_report=base.key, grader="g")
    run.write(EntryKind.CLOSED, body)
    run.ledger.seal_file()
    return run


def clone(tree: Tree, run: TreeRun, seed: int, alter: Alter) -> None:
    """The run under another seed: run.json anew, every entry altered and chained again."""
    made = tree.run(**{**run.science.model_dump(), "seed": seed, "recipe": RECIPE})
    shutil.copytree(run.dir.items, made.dir.items, dirs_exist_ok=True)
    before = sha256_hex(made.dir.record.read_bytes())
    for path in sorted(run.dir.ledger.glob("*.json")):
        entry = json.loads(path.read_bytes())
        alter(entry, seed)
        data = canonical_json({**entry, "prev": before}) + b"\n"
        (made.dir.ledger / path.name).write_bytes(data)
        before = sha256_hex(data)
    Ledger(made.dir).seal_file()


def as_it_is(entry: dict[str, Any], seed: int) -> None:
    """Alter nothing: equal weights, answers and times."""


def other_weights(entry: dict[str, Any], seed: int) -> None:
    for holder in (entry["body"], entry["body"].get("evaluation"), entry["body"].get("report")):
        if holder and holder.get("content_hash"):
            holder["content_hash"] = sha(f"{holder['content_hash']}-{seed}")


def other_answers(entry: dict[str, Any], seed: int) -> None:
    other_weights(entry, seed)
    if entry["kind"] == "closed":
        entry["body"]["report"]["items_sha256"] = sha(f"items-{seed}")


def other_times(entry: dict[str, Any], seed: int) -> None:
    other_answers(entry, seed)
    body = entry["body"]
    body.update({name: body[name] + seed / 7 for name in ("elapsed_s", "intake_s") if body.get(name)})


def in_one_process(entry: dict[str, Any], seed: int) -> None:
    other_times(entry, seed)
    entry["at"] = entry["at"].replace("20", "19", 1)  # another day
    entry["writer"].update(host="node7", job_id="4711", pid=31337)


def cells(merged: MergedReport) -> dict[str, tuple[int | None, str | None]]:
    (board,) = merged.boards
    return {row.agent: (cell.rank, cell.unranked) for row in board.rows if (cell := row.cells[0]) is not None}


def honest(tree: Tree, agent: str = "honest", wrong: str = "wrong") -> None:
    for seed in range(3):
        lucky(tree, seed, wrong, name=agent, agent=agent)


@pytest.mark.parametrize(
    ("alter", "shared"),
    [
        (
            as_it_is,
            "the same weights, the same answer to every held-out item, the same measured times, one supervisor process",
        ),
        (other_weights, "the same answer to every held-out item, the same measured times, one supervisor process"),
        (other_answers, "the same measured times, one supervisor process"),
        (in_one_process, "one supervisor process"),
    ],
)
def test_a_run_cloned_into_seeds_is_named_and_unranked(tmp_path: Path, alter: Alter, shared: str) -> None:
    """A cloned lucky run headed the leaderboard with n = 5 and no spread, and `verify` said nothing."""
    tree = Tree(tmp_path / "runs" / "exp")
    honest(tree)
    run = lucky(tree, 10, name="clone", agent="cloned")
    if alter is in_one_process:
        for seed in (*SEEDS, 15):
            clone(tree, run, seed, alter)
        shutil.rmtree(run.dir.path)
        tree.runs = [one for one in tree.runs if one is not run]
        tree.save()
    else:
        for seed in SEEDS:
            clone(tree, run, seed, alter)
    merged = report.build([tree.path])
    found = cells(merged)
    assert found["cloned"] == (None, "5 of 5 runs may not be what they say: see their notes")
    assert found["honest"] == (1, None)
    doubted = [one for one in merged.runs if one.agent == "cloned"]
    assert len(doubted) == 5 and not any(one.ranked for one in doubted)
    for one in doubted:
        assert len(one.doubts) == 4 and one.doubts[0].startswith(f"the same run twice: {shared} as exp/")
        assert one.doubts[-1] == "the same run twice: and 1 more runs"
    assert not any(one.doubts for one in merged.runs if one.agent == "honest")
    assert any("5 of 8 runs may not be what they say" in note for note in merged.notes)
    verdict = report.compare(merged, "cloned", "honest").verdict()
    assert verdict.endswith("But 5 of 5 runs of cloned may not be what they say: see their notes."), verdict


def test_verify_names_the_same_run_under_two_experiments_and_agents(tmp_path: Path) -> None:
    one, two = Tree(tmp_path / "runs" / "ours"), Tree(tmp_path / "runs" / "theirs")
    run = lucky(one, 3)
    lucky(one, 4)
    clone(two, run, 9, as_it_is)
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "runs")])
    assert done.output.count("the same run twice: the same weights") == 2, done.output
    assert f"as ours/{run.dir.run_id}: neither ranks" in done.output


def test_rescore_looks_for_the_bundles_run_among_those_below_the_root(tmp_path: Path) -> None:
    """`rescore` held for each of the clones, because it saw one bundle alone; a copy of the bundle's own run is no other run."""
    tree, elsewhere = Tree(tmp_path / "runs" / "exp"), Tree(tmp_path / "bundle" / "evidence")
    run = lucky(tree, 3)
    clone(elsewhere, run, 9, as_it_is)
    for folder, experiment, told in ((elsewhere.runs[0].dir, elsewhere, 1), (run.dir, tree, 0)):
        verdict = verify_run(experiment.experiment, folder)
        name_same_runs([verdict, *marked_runs(Root(tmp_path))])
        assert sum("the same run twice" in note for note in verdict.notes) == told, verdict.notes


def test_honest_runs_that_look_alike_are_not_the_same(tmp_path: Path) -> None:
    """Whoever answers all rightly, or all with one text, answers like another; and a base model's times are shared."""
    tree = Tree(tmp_path / "exp")
    honest(tree, "collapsed", wrong="")
    for seed in range(3):
        tree.run(seed=seed, agent="null").start().seal(5.123456789 + seed).close()
        copied = tree.run(seed=seed, agent="copycat").start()
        copied.submit(10.0 + seed, is_base=True)
        copied.score(1, None)
        copied.seal(20.0 + seed).close()
    merged = report.build([tree.path])
    assert not [one.doubts for one in merged.runs if one.doubts]
    assert cells(merged)["collapsed"] == (1, None)


@pytest.mark.parametrize(
    ("same", "tokens", "named"),
    [(39, 100, True), (38, 100, True), (36, 100, False), (0, 100, False), (39, 8, False)],
)
def test_a_clone_with_a_few_other_answers_is_named(tmp_path: Path, same: int, tokens: int, named: bool) -> None:
    """95 % of the long wrong answers; short ones two honest seeds share (99 % of arithmetic's)."""
    tree = Tree(tmp_path / "exp")
    for seed in (1, 2):
        lucky(tree, seed, tokens=tokens, same=same)
    found = [one.doubts for one in report.build([tree.path]).runs]
    assert all(bool(doubts) is named for doubts in found)
    if named:
        assert found[0][0].startswith("the same run twice: nearly all of the long wrong answers as exp/")


def as_bin(tensors: dict[str, Any]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:  # as torch.save lays it out
        archive.writestr("m/data.pkl", b"\x80")
        for number, tensor in enumerate(tensors.values()):
            archive.writestr(f"m/data/{number}", tensor.tobytes())
    return packed.getvalue()


TENSORS = {f"model.{n}": np.arange(n, n + 50, dtype=np.float32) for n in range(4)}
SHIPPED: dict[str, dict[str, bytes]] = {
    "w": {"w/model.safetensors": save(TENSORS)},
    "notes.txt": {"notes.txt": save({name.upper(): one for name, one in TENSORS.items()})},
    "w.bin": {"w.bin": as_bin(TENSORS)},
    "w.gz": {"w.gz": gzip.compress(save(TENSORS))},
    "w.bin.gz": {"w.bin.gz": gzip.compress(as_bin(TENSORS))},
    "0.x": {f"{n}.x": save({name: one}) for n, (name, one) in enumerate(TENSORS.items())},
    "2.x": {f"{n}.x": save({f"model.{n}": TENSORS[f"model.{n}"]}) for n in (2, 3)},
    "": {
        "train.py": b"print(1)",
        "data.zip": b"PK\x03\x04 and no zip",
        "one.st": save({"model.1": TENSORS["model.1"]}),
    },
}


@pytest.mark.parametrize("named", SHIPPED)
def test_weights_of_the_agents_own_folder_unrank(tmp_path: Path, named: str) -> None:
    """An agent that brings a trained model along had its score ranked; then one that renames, packs or splits it."""
    tree = Tree(tmp_path / "exp")
    agent = tree.experiment.code / sha("code") / "templates" / "agents" / "cheat"
    for name, data in SHIPPED[named].items():
        (agent / name).parent.mkdir(parents=True, exist_ok=True)
        (agent / name).write_bytes(data)
    made = tree.experiment.artifacts / "made"
    made.mkdir()
    (made / "model.safetensors").write_bytes(save(TENSORS))
    content = folder_content_hash(made)
    made.rename(tree.experiment.artifacts / content)
    run = tree.run(agent="cheat").start()
    run.submit(100.0, outcomes(40, range(30)), content_hash=content)
    run.seal().close(outcomes(100, range(80)))
    (one,) = report.build([tree.path]).runs
    told = (f"the selected weights came with the agent, in its folder cheat/{named}",) if named else ()
    assert one.doubts == told and one.ranked is not bool(named)


@pytest.mark.parametrize(
    ("programs", "steps", "trained"),
    [
        ([("tar xf /x/w.tar -C output/v1", 40.0), ("python3 ./submit output/v1", 0.1)], 0, False),
        ([("python3 -c import shutil", 0.2)], 0, False),
        ([("python3 code/own_loop.py", 400.0)], 0, None),
        ([("./train", None)], 0, None),
        ([], 0, None),
        ([("tar xf a", 1.0)], 5, True),
    ],
)
def test_a_gain_without_a_training_unranks(
    tmp_path: Path, programs: list[tuple[str, float | None]], steps: int, trained: bool | None
) -> None:
    tree = Tree(tmp_path / "exp")
    run = lucky(tree)
    for number, (command, cpu_s) in enumerate(programs, 50):
        add(run, "processes", process(20.0, command, pid=number))
        if cpu_s is not None:
            add(run, "processes", process(90.0, command, "ended", pid=number, began_s=20.0, cpu_s=cpu_s))
    if steps:
        add(run, "training", *(point(30.0 + i, i, trainer="SFTTrainer", loss=1.0) for i in range(1, steps)))
    (one,) = report.build([tree.path]).runs
    assert one.improvement is not None and one.improvement.difference == 35.0
    assert one.story.trained is trained and one.ranked is (trained is not False)
    assert [doubt.split(":")[0] for doubt in one.doubts] == ["+35.0 points, and nothing was trained"] * (
        trained is False
    )
