"""`verify` on experiments: what was cut or lost is named, one damaged experiment hides no other; and on experiment.json, which no
chain covers: held against experiment.yaml and the runs."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import needs
import pytest
from recordmaker import add, process
from treemaker import Tree, TreeRun, outcomes, save_items
from typer.testing import CliRunner

from autorl_hpc.cli import app
from autorl_hpc.errors import AutorlError
from autorl_hpc.evidence.verify import SHARED, VerifyResult, as_lines, verify_paths, verify_run
from autorl_hpc.files.checkpoint import walk_files
from autorl_hpc.files.frozen_records import recorded_hashes
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.store import code_hash
from autorl_hpc.records import readable_json
from autorl_hpc.records.experiment import Budget
from autorl_hpc.report import report
from autorl_hpc.report.pages import run_summary


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def made(path: Path) -> tuple[Tree, TreeRun]:
    tree = Tree(path)
    tree.experiment.code.rmdir()
    run = tree.finished(seed=0, solved=30)
    (tree.experiment.finished / run.dir.run_id).touch()
    return tree, run


def freeze(tree: Tree) -> Path:
    """Frozen code under its hash, named by experiment.json and by every run, whose ledgers begin after that."""
    work = tree.path / "work"
    (work / "autorl_hpc").mkdir(parents=True)
    (work / "autorl_hpc" / "cli.py").write_text("print(1)\n")
    named = code_hash({"": (work, walk_files(work))})
    tree.experiment.code.mkdir(exist_ok=True)
    work.rename(tree.experiment.code / named)
    for path in (tree.experiment.resolved, *(run.dir.record for run in tree.runs)):
        path.write_text(json.dumps({**json.loads(path.read_text()), "code_hash": named}))
    return tree.experiment.code / named


def problems(*paths: Path) -> dict[str, list[str]]:
    return {verdict.run_id: verdict.problems for verdict in verify_paths(paths)}


def test_whole_experiment(tmp_path: Path) -> None:
    tree, run = made(tmp_path / "exp")
    assert problems(tree.path) == {SHARED: [], run.dir.run_id: []}
    assert "not checked" in "\n".join(as_lines(verify_paths([tree.path])))  # it has no frozen code
    assert problems(run.dir.path) == {run.dir.run_id: []}


def test_damaged_experiment_hides_no_other(tmp_path: Path) -> None:
    bad, _ = made(tmp_path / "runs" / "bad")
    made(tmp_path / "runs" / "good")
    for damage in ("{", '{"spec": 1}', None):
        bad.experiment.resolved.unlink() if damage is None else bad.experiment.resolved.write_text(damage)
        verdicts = verify_paths([tmp_path / "runs"])
        found = [(v.experiment, v.of, v.whole) for v in verdicts]
        kinds = ("experiment", "run")
        assert found == [("bad", "experiment", False), ("bad", "run", True), *(("good", kind, True) for kind in kinds)]
        assert verdicts[0].run_id == SHARED and "experiment.json" in verdicts[0].problems[0]
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "runs")])
    assert done.exit_code == 1 and "DAMAGED  bad: experiment.json and code" in done.stdout
    assert "2 runs, 0 damaged; 1 damaged in experiment.json and code" in done.stdout


def test_every_given_path_must_hold_something(tmp_path: Path) -> None:
    tree, run = made(tmp_path / "runs" / "exp")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    bare = Tree(tmp_path / "bare")
    bare.experiment.code.rmdir()
    bare.save()
    for name in ("missing", "empty", "file", "bare"):
        for good in (tree.path, run.dir.path):
            for paths in ([good, tmp_path / name], [tmp_path / name, good]):
                with pytest.raises(AutorlError) as caught:
                    verify_paths(paths)
                assert caught.value.where == str(tmp_path / name)


@pytest.mark.parametrize("cut", [1, 3])
def test_cut_tail_of_a_finished_run(tmp_path: Path, cut: int) -> None:
    tree, run = made(tmp_path / "exp")
    *entries, last = sorted(run.dir.ledger.iterdir())[:-cut]
    for path in sorted(run.dir.ledger.iterdir())[-cut:]:
        path.unlink()
    run.dir.sealed_ledger.write_bytes(b"".join(path.read_bytes() for path in (*entries, last)))
    named = [f"finished, but its ledger has no closing entry: entries after {last.stem} are missing"]
    assert problems(tree.path)[run.dir.run_id] == named
    run.dir.sealed_ledger.unlink()
    assert problems(run.dir.path)[run.dir.run_id] == named
    (
        tree.experiment.finished / run.dir.run_id
    ).unlink()  # without the mark it is a run that goes on, but for what outlives the cut
    outlived = "items/000002.report.jsonl.gz is there, and the ledger has no score by it: its last entries are missing"
    assert outlived in problems(tree.path)[run.dir.run_id]


def test_a_score_that_a_grader_is_about_to_commit_is_no_cut(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "exp")
    run = tree.run().start()
    run.submit(10.0)
    save_items(run.dir.items / "000001.feedback.jsonl.gz", outcomes(40, range(5)))
    assert "its last entries are missing" in problems(run.dir.path)[run.dir.run_id][0]
    entry = tree.experiment.queue / f"f-{run.dir.run_id}--000001.json"
    entry.touch()
    assert problems(run.dir.path)[run.dir.run_id] == []
    entry.unlink()
    (run.dir.items / "000001.feedback.jsonl.gz").rename(run.dir.items / "000001.report.jsonl.gz")
    run.seal()
    closing = tree.experiment.queue / f"c-{run.dir.run_id}.json"
    assert len(problems(run.dir.path)[run.dir.run_id]) == 1
    closing.touch()
    assert problems(run.dir.path)[run.dir.run_id] == []


def test_a_merged_report_outlives_a_cut(tmp_path: Path) -> None:
    """Everything of the run's own was removed with its last entries; the report names a head that the ledger never had."""
    tree, run = made(tmp_path / "exp")
    report.refresh([tree.path])
    for path in (*sorted(run.dir.ledger.iterdir())[3:], *run.dir.items.iterdir(), *run.dir.report.iterdir()):
        path.unlink()
    run.dir.sealed_ledger.unlink()
    (tree.experiment.finished / run.dir.run_id).unlink()
    named = f"report/summary.json names a head of {run.dir.run_id} that its ledger never had: one of them was altered"
    assert problems(tree.path)[SHARED] == [named]


RECORDS = ("usage.jsonl", "logs/processes.jsonl", "logs/training.jsonl")


@pytest.mark.parametrize("name", RECORDS)
def test_what_the_recorder_saw_is_sealed(tmp_path: Path, name: str) -> None:
    """A doubt hangs on it ("nothing was trained"): it vanished with the file, and the run ranked."""
    tree = Tree(tmp_path / "exp")
    run = tree.run().start()
    run.submit(100.0, outcomes(40, range(20)))
    add(run, "processes", process(20.0, "tar xf w.tar", pid=50))
    for record in RECORDS:
        (run.dir.path / record).parent.mkdir(exist_ok=True)
        (run.dir.path / record).touch()
    run.seal(recorded=recorded_hashes(run.dir)).close(outcomes(100, range(60)))

    def seen() -> tuple[list[str], tuple[str, ...]]:
        return problems(run.dir.path)[run.dir.run_id], report.build([tree.path]).runs[0].doubts

    path = run.dir.path / name
    assert seen() == (
        [],
        ("+35.0 points, and nothing was trained: no step was logged, and no program ran that could train",),
    )
    told = report.build([tree.path]).runs[0]
    bundled = Tree(tmp_path / "bundle" / "exp").experiment.run(run.dir.run_id)
    shutil.copytree(tree.path, tmp_path / "bundle" / "exp", dirs_exist_ok=True)
    for path_of in RECORDS:
        (bundled.path / path_of).unlink()
    bundled.report.mkdir()
    (bundled.report / "summary.json").write_bytes(run_summary(told))
    verdict = verify_run(ExperimentDir(bundled.path.parent), bundled, exported=True)
    theirs = report.build([bundled.path.parent]).runs[0]  # by a maintainer, who has the bundle alone
    assert verdict.problems == [] and not theirs.ranked and not told.ranked
    assert verdict.notes[1:] == [f"in doubt: {doubt}" for doubt in told.doubts]
    (site,) = report.refresh([bundled.path.parent], tmp_path / "site", report.Options(unpacked=True)).load().runs
    assert site.doubts == told.doubts and not site.ranked, "a leaderboard's site of bundles"
    (bundled.report / "summary.json").write_text(json.dumps({**json.loads(run_summary(told)), "doubts": 7}))
    (found,) = verify_run(ExperimentDir(bundled.path.parent), bundled, exported=True).problems
    assert "`ranked` is False" in found
    for damage, word in (
        (lambda: path.write_text("{}\n"), "is not the one that was there"),
        (path.unlink, "is missing"),
    ):
        damage()
        found, (doubt,) = seen()
        assert found == [f"{name} {word}: see the run's seal"]
        assert doubt == f"+35.0 points, and nothing shows a training as it was sealed: {name} {word}"


def test_frozen_code(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "exp")
    run = tree.run()  # its ledger is empty: run.json may still be written
    code = freeze(tree)
    run.start()
    whole = verify_paths([tree.path])
    assert [(v.run_id, v.problems) for v in whole] == [(SHARED, []), (run.dir.run_id, [])]
    assert as_lines(whole)[0].startswith("whole    exp: experiment.json and code  2 entries  head ")
    assert as_lines(whole)[-1].startswith("1 runs, 0 damaged. ")

    name, program = f"code/{code.name[:16]}...", code / "autorl_hpc" / "cli.py"
    altered = [f"{name} was altered: its content no longer has the hash that it is named by"]
    program.write_text("print(2)\n")
    assert problems(tree.path)[SHARED] == altered
    program.write_text("print(1)\n")
    (code / "extra.py").touch()
    assert problems(tree.path)[SHARED] == altered
    (code / "extra.py").unlink()
    assert problems(tree.path)[SHARED] == []
    code.rename(code.with_name("elsewhere"))
    assert problems(tree.path)[SHARED] == [f"{name} is missing"]
    assert problems(run.dir.path) == {run.dir.run_id: []}  # one run alone: its experiment isn't asked about


def test_experiment_that_names_other_code_than_its_runs(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "exp")
    run = tree.run()
    tree.run(seed=1)
    code = freeze(tree)
    other = {**json.loads(run.dir.record.read_text()), "code_hash": "0" * 64}
    run.dir.record.write_text(json.dumps(other))
    found = problems(tree.path)[SHARED]
    assert found == [f"experiment.json names code/{code.name[:16]}..., and {run.dir.run_id}/run.json names other code"]


def test_a_run_that_experiment_json_does_not_name_is_verified_and_named(tmp_path: Path) -> None:
    tree, run = made(tmp_path / "exp")
    record = json.loads(tree.experiment.resolved.read_text())
    tree.experiment.resolved.write_text(json.dumps({**record, "runs": []}))
    found = problems(tree.path)
    assert run.dir.run_id in found
    assert "doesn't name it" in found[SHARED][0]


def test_a_selected_checkpoint_that_lost_its_manifest_is_damage(tmp_path: Path) -> None:
    tree, run = made(tmp_path / "exp")
    view = RunView.of(Ledger(run.dir).read())
    assert view.closed is not None and view.closed.selected is not None
    content = view.submissions[view.closed.selected].content_hash or ""
    assert "the selected checkpoint, is not here" in "\n".join(as_lines(verify_paths([tree.path])))
    (tree.experiment.artifacts / content).mkdir()
    assert any("lost its manifest" in problem for problem in problems(tree.path)[run.dir.run_id])


# --- experiment.json against experiment.yaml and the runs ---

YAML = """name: exp
matrix: {task: arithmetic, agent: sft, base_model: org/tiny}
budget: {wall_clock: 20m}
sandbox: {network: open}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """An experiment as launch leaves it, but for its code."""
    tree = Tree(tmp_path / "exp")
    tree.experiment.code.rmdir()
    tree.finished(seed=0, solved=30)
    give(tree, YAML)
    assert shared(tree).problems == [] and len(shared(tree).notes) == 1  # code/ is not here
    return tree


def give(tree: Tree, text: str) -> None:
    tree.experiment.given.write_text(text)
    edit(tree, spec_sha256=hashlib.sha256(text.encode()).hexdigest())


def edit(tree: Tree, **fields: Any) -> None:
    path = tree.experiment.resolved
    value = json.loads(path.read_text())
    spec = value["spec"] | fields.pop("spec", {})
    path.write_bytes(readable_json(value | {"spec": spec} | fields))


def shared(tree: Tree) -> VerifyResult:
    return next(verdict for verdict in verify_paths([tree.path]) if verdict.run_id == SHARED)


def test_another_yaml(tree: Tree) -> None:
    tree.experiment.given.write_text(YAML.replace("20m", "2h"))
    assert "experiment.yaml has not the hash that experiment.json names" in shared(tree).problems[0]
    tree.experiment.given.unlink()
    verdict = shared(tree)
    assert verdict.problems == [] and any("experiment.yaml is not here" in note for note in verdict.notes)


def test_a_spec_that_is_not_that_of_the_yaml(tree: Tree) -> None:
    true = tree.experiment.resolved.read_bytes()
    others: dict[str, object] = {"budget": {"wall_clock_s": 7200.0}, "attempts": 9, "sandbox": {"level": "none"}}
    for name, value in {**others, "protocol": "paper", "retention": {"artifacts": "all"}}.items():
        edit(tree, spec={name: value})
        assert f"experiment.json was altered: its `{name}` is not that of experiment.yaml" in shared(tree).problems
        tree.experiment.resolved.write_bytes(true)
    edit(tree, grader={"batch_tokens": 256})
    assert shared(tree).problems == ["experiment.json was altered: its `grader` is not that of its `spec`"]


@pytest.mark.parametrize("change", [("20m", "2h"), ("network: open", "network: none")])
def test_both_written_anew_don_t_fit_the_runs(tree: Tree, change: tuple[str, str]) -> None:
    give(tree, YAML.replace(*change))
    spec = {"budget": {"wall_clock_s": 7200.0}} if change[0] == "20m" else {"sandbox": {"network": "none"}}
    edit(tree, spec=spec)
    assert shared(tree).problems == ["experiment.json was altered: no run has its budget, protocol and network"]


def test_another_budget_or_level_of_the_sandbox_is_a_note(tree: Tree) -> None:
    """A second launch may have changed them."""
    tree.run(seed=1, budget=Budget(wall_clock_s=2400))
    give(tree, YAML)
    verdict = shared(tree)
    assert verdict.problems == []
    assert any("of an earlier launch, or experiment.json was altered" in note for note in verdict.notes)
    give(tree, YAML.replace("{network: open}", "{level: bwrap, network: open}"))
    edit(tree, spec={"sandbox": {"level": "bwrap", "network": "open"}})
    verdict = shared(tree)
    assert verdict.problems == []
    assert any("asks for sandbox auto, experiment.json for bwrap" in note for note in verdict.notes)


def as_another_user(look: Any) -> Any:
    left, right = multiprocessing.Pipe()

    def inside() -> None:
        os.setgid(65534)
        os.setuid(65534)
        right.send(look())

    child = multiprocessing.get_context("fork").Process(target=inside)
    child.start()
    assert left.poll(60), "it ended without a verdict"
    found = left.recv()
    child.join()
    return found


def test_what_is_closed_to_this_user_is_named_and_ends_no_verify() -> None:
    """`verify` of a second user ended at the first folder that the owner had closed, and left a closed experiment out in silence."""
    if os.getuid() != 0:
        needs.skip("root", "becoming another user")
    with tempfile.TemporaryDirectory() as name:
        runs = Path(name) / "runs"
        open_, whole = Tree(runs / "open"), Tree(runs / "whole")
        for tree in (open_, whole):
            tree.experiment.code.rmdir()
        made = [open_.finished(seed=seed, solved=30 + seed) for seed in range(3)]
        whole.finished(seed=7, solved=30)
        closed: dict[Path, str] = {}
        for part in ("code", "baselines", "artifacts", "report"):
            tree = Tree(runs / f"closed-{part}")
            tree.finished(seed=9, solved=40)
            _ = part == "code" or tree.experiment.code.rmdir()
            path = getattr(tree.experiment, part)
            path.mkdir(exist_ok=True)
            closed[path] = f"closed-{part}"
        alone = Tree(runs / "closed")
        alone.finished(seed=1, solved=30)
        closed |= {alone.path: "closed", made[0].dir.path: "open", made[1].dir.items: "open"}
        Path(name).chmod(0o755)
        for path in closed:
            path.chmod(0)

        def look() -> Any:
            found = []
            for paths in ([runs], [alone.path], [made[0].dir.path, open_.path], [alone.path / made[0].dir.run_id]):
                verdicts = verify_paths(paths)
                done = CliRunner().invoke(app, ["verify", *map(str, paths)])
                found.append(
                    ([(one.experiment, one.run_id, one.problems, one.unseen) for one in verdicts], done.exit_code)
                )
            return found

        (all_, code), *others = as_another_user(look)
        assert code == 1 and all(code == 1 and told[0][3] for told, code in others)
        assert [problems for *_, problems, _ in all_ if problems] == []
        named = {experiment for experiment, _, _, unseen in all_ if "Permission denied" in " ".join(unseen)}
        assert named == {*closed.values()}
        partly = {run_id for experiment, run_id, _, unseen in all_ if experiment == "open" and unseen}
        assert partly == {made[0].dir.run_id, made[1].dir.run_id}
        assert not any(unseen for experiment, _, _, unseen in all_ if experiment == "whole")
