"""What of a run is missing, damaged, altered or hidden is said, and costs only what stood in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import recordmaker as make
import toldruns
from toldruns import KEY, SFT, recorded_run, told
from treemaker import Tree, outcomes

from autorl_hpc.files.queue import append_event
from autorl_hpc.records.entries import Contaminated, Contamination
from autorl_hpc.records.recorded import CodeRevision
from autorl_hpc.report.hidden_items import Hidden
from autorl_hpc.report.run_page import mode_told
from autorl_hpc.report.run_story import context
from autorl_hpc.report.run_story.iterations import MAX_PAIRED, shown_lines, shown_settings
from autorl_hpc.report.run_story.story import tell
from autorl_hpc.report.story_records import (
    EvidenceLine,
    ReferenceMetrics,
    ResourcesUsed,
    RouteTold,
    Setting,
    SkillMetrics,
    Story,
)
from autorl_hpc.report.summary import RunSummary
from autorl_hpc.states import EntryKind, Fault, Route, Split

no_fsync, tree = toldruns.no_fsync, toldruns.tree


def test_a_run_whose_logs_and_code_disagree_says_so_and_tells_nothing_of_its_mode(tree: Tree) -> None:
    def of(trainer: str, seed: int) -> RunSummary:
        run = tree.run(agent="codex", mode="rl-only", seed=seed).start()
        revision = make.code(run, 40.0, {"code/train.py": SFT})
        make.add(run, "processes", make.process(50.0, "python code/train.py"))
        make.add(run, "training", *(make.point(60.0 + i, i, trainer=trainer, loss=1.0) for i in range(1, 9)))
        run.submit(100.0, outcomes(40, range(12)), code_revision=revision)
        return told(run.seal(600.0).close(outcomes(100, range(45))))

    forged, honest = of("GRPOTrainer", 1), of("SFTTrainer", 2)
    assert (forged.story.route.planned, forged.story.route.executed) == (Route.SFT, Route.GRPO)
    assert forged.story.mode_kept is None and honest.story.mode_kept is False
    (note,) = (note for note in forged.notes if note.startswith("logs and code disagree"))
    assert "train.py" in note and "GRPOTrainer" in note and KEY not in note
    assert "logs and code disagree" in mode_told(forged)
    assert not any("disagree" in note for note in honest.notes)


def test_a_diff_is_bounded_cleaned_and_hides_what_is_held_out(tree: Tree) -> None:
    run = tree.run(seed=1).start()
    many = {f"code/f{i:03d}.py": "a\n" for i in range(context.MAX_CHANGES + 7)}
    long = "".join(f"line {i}\n" for i in range(5000))
    revision = make.code(run, 1.0, {**many, "code/long.py": long})
    run.submit(2.0, outcomes(40, range(10)), code_revision=revision)
    hostile = "\x1b[31mred\x1b]0;title\x07 \u202egnp.exe\r\n" + "y" * 10_000
    leak = {"code/hostile.py": hostile, "code/leak.py": "the question itself\n", "code/\x1b[1m\nodd|.py": "z\n"}
    run.submit(3.0, outcomes(40, range(10)), code_revision=make.code(run, 2.5, {**many, **leak}))
    found = (Contaminated(file="code/leak.py", split=Split.REPORT, how="exact", items=1, first_items=("q7",)),)
    look = Contamination(submission_id=2, whole={Split.REPORT: 1}, items={Split.REPORT: 1}, found=found, complete=True)
    run.write(EntryKind.CONTAMINATION, look)
    first, second = told(run).story.iterations
    assert len(first.changes) == context.MAX_CHANGES and first.more_changes == 8
    assert first.diff is not None and len(first.diff.split("\n")) <= context.MAX_DIFF_LINES + 1
    assert second.diff is not None
    assert "question itself" not in second.diff and "held-out items were found" in second.diff
    assert not set("\x1b\x07\r\u202e") & set(second.diff + "".join(c.path for c in second.changes))
    assert max(map(len, second.diff.split("\n"))) <= context.MAX_LINE_CHARS
    assert any(c.path == "code/ odd|.py" for c in second.changes)


def test_more_found_than_is_listed_hides_all_words(tree: Tree) -> None:
    run = recorded_run(tree)
    look = Contamination(submission_id=1, found_unlisted=3, complete=True)
    run.write(EntryKind.CONTAMINATION, look)
    story = told(run).story
    assert all("SFTConfig" not in (one.diff or "") for one in story.iterations)
    assert all("SFT" not in line.says for one in story.iterations for line in one.route.planned_by)


def test_a_run_that_nobody_recorded(tree: Tree) -> None:
    run = told(tree.finished(seed=0, solved=40))
    story = run.story
    assert story.route.planned is Route.UNKNOWN and story.resources == ResourcesUsed(wait_s=story.resources.wait_s)
    assert [one.diff for one in story.iterations] == [None, None] and story.recorder == ()
    for one in story.iterations:
        assert (one.tokens, one.gpu_hours, one.cost_usd, one.training_steps, one.revision) == (None,) * 5
        assert one.settings == () and one.changes == ()
    assert story.metrics == ReferenceMetrics(
        valid_submission_rate=1.0,
        first_valid_idx=1,
        first_valid_delay=100.0,
        time_to_first_improvement=100.0,
        time_to_best=400.0,
        monotonic_ratio=1.0,
        time_used_ratio=0.5,
        last_submit_gap=200.0,
    )
    assert story.skill.without_human_help is None  # there are no events that would tell
    queued = told(tree.run(seed=1)).story
    assert queued.iterations == () and queued.route == RouteTold() and queued.failure is None
    assert queued.skill == SkillMetrics() and queued.metrics == ReferenceMetrics()


def test_a_damaged_file_costs_only_what_stood_in_it(tree: Tree) -> None:
    run = recorded_run(tree).seal(600.0).close(outcomes(100, range(45)))
    whole = told(run)
    for name in ("trace", "usage", "processes", "training", "revisions"):
        path = run.dir.recorded(name)
        before = path.read_bytes()
        path.write_bytes(b"\x00\xff garbage\n" * 3 + b'{"elapsed_s": 1')
        damaged = told(run)
        assert f"4 lines of {path.name} can't be read" in damaged.story.recorder[0]
        assert damaged.improvement == whole.improvement and damaged.story.metrics == whole.story.metrics
        assert [one.score for one in damaged.story.iterations] == [one.score for one in whole.story.iterations]
        path.write_bytes(before)


def test_damaged_code_is_said(tree: Tree) -> None:
    run = recorded_run(tree)
    for path in (run.dir.code_git / "objects").rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            path.write_bytes(b"damaged")
    story = told(run).story
    assert all(one.diff is None and one.changes == () for one in story.iterations)
    assert any("code.git" in note for note in story.recorder)


def test_what_the_recorder_missed_and_what_became_of_the_gateway_is_said(tree: Tree) -> None:
    run = recorded_run(tree)
    append_event(run.dir.events, "gateway_hung", questions=4)
    for _ in range(30):
        append_event(run.dir.events, "gateway_crashed", exit_code=-9, again_in_s=0.0)
    assert told(run).story.recorder == ("gateway hung: 1 time", "gateway crashed: 30 times")
    seen = {"at": "x", "revision": "0" * 40, "by_name": 3, "reason": f"left out by name: code/{KEY}/.cache"}
    make.add(run, "revisions", CodeRevision.model_validate({"elapsed_s": 500.0, **seen}))
    notes = told(run).story.recorder
    assert any("up to 3 files and folders were left out by their names" in note for note in notes)
    assert any("left out by name: code/" in note for note in notes) and not any(KEY in note for note in notes)
    append_event(run.dir.events, "recorder_trouble", watch="usage", message="nvidia-smi \x1b[31m: no answer")
    for i in range(30):
        append_event(run.dir.events, "recorder_trouble", watch="training", message=f"trouble {i}")
    append_event(run.dir.events, "recorder_started", pid=3)
    run.interrupt(450.0).start(450.0)
    notes = told(run).story.recorder
    assert "recorder trouble: watch usage, message nvidia-smi : no answer" in notes
    assert not any("started" in note for note in notes)
    assert len(notes) == 12 and notes[-1].startswith("and ") and notes[-1].endswith(" more")


def test_of_many_the_selected_one_alone_is_opened(tree: Tree) -> None:
    run = tree.run(seed=4).start()
    for at in range(1, MAX_PAIRED + 2):
        run.submit(float(at), outcomes(40, range(13 if at == 4 else 14 - at % 3)), final=at == 4)
    story = told(run.seal().close(outcomes(100, range(30)))).story
    assert [(one.submission_id, one.won) for one in story.iterations if one.won is not None] == [(4, 3)]
    assert story.opened == (4,)
    assert all(one.improvement is not None for one in story.iterations)


def test_items_of_an_altered_file_give_no_interval(tree: Tree) -> None:
    run = recorded_run(tree).seal(600.0).close(outcomes(100, range(45)))
    path = run.dir.items / "000002.feedback.jsonl.gz"
    path.chmod(0o644)
    path.write_bytes(b"x")
    second = told(run).story.iterations[1]
    assert second.improvement == 5.0 and second.improvement_low is None and second.won is None


def test_infrastructure_is_the_failure_of_a_lost_run(tree: Tree) -> None:
    run = tree.run(seed=6).start().seal(1.0, fault=Fault.CLUSTER)
    run.close(selected_by="infrastructure", report=None, fault=Fault.CLUSTER, reason="node lost")
    failure = told(run).story.failure
    assert failure is not None and failure.kind == "infrastructure"


def test_evidence_is_cleaned_masked_bounded_and_hidden() -> None:
    lines = [
        EvidenceLine(where="train.py:3", says=f"    os.environ['HF_TOKEN'] = '{KEY}'  \x1b[31m\u202e"),
        EvidenceLine(where="code/leak.py:9", says="the question itself"),
        EvidenceLine(where="leak.py:9", says="the question itself"),
        EvidenceLine(where="agent.log, byte 77", says="the question itself"),
        EvidenceLine(where="x" * 1000, says="y" * 1000),
    ]
    assert len(shown_lines([EvidenceLine(where=f"a.py:{i}", says="x") for i in range(30)])) == 8
    found = shown_lines(lines * 3, Hidden(files=frozenset({"leak.py", "agent.log"}), found=True))
    assert len(found) == 5 and found[0].says == "os.environ['HF_TOKEN'] = '***'"
    assert all(line.says.startswith("(not shown") for line in found[1:4])
    assert len(found[4].where) <= 160 and len(found[4].says) <= 240
    assert all(line.says.startswith("(not shown") for line in shown_lines(lines, Hidden(found=True, everything=True)))
    secret = shown_settings(
        [Setting(name="api_key", value=KEY, where="a.py:1"), Setting(name="beta", value="0.1", where="")]
    )
    assert [one.value for one in secret] == ["***", "0.1"]


def test_a_defect_costs_the_story_and_not_the_scores() -> None:
    assert tell(cast("Any", SimpleNamespace(run=SimpleNamespace(run_id="r")))) == Story(
        recorder=("the story could not be told: AttributeError",)
    )
