"""A recorded run, told: by its iterations and in the merged report, with what is missing, damaged, altered or held out."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any, cast

import demotree
import pytest
import recordmaker as make
from helpers import PATIENCE_S
from recordmaker import KEY, SFT, recorded_run, told
from treemaker import Tree, TreeRun, outcomes

from autorl_hpc.files.queue import append_event
from autorl_hpc.files.safe_open import DriverCall, LogWriter
from autorl_hpc.records.entries import Contaminated, Contamination
from autorl_hpc.records.recorded import CodeRevision, ObservedFact
from autorl_hpc.report import report
from autorl_hpc.report.hidden_items import IN_FILE, IN_WORKSPACE, NAME, Hidden, hidden_of
from autorl_hpc.report.run_page import iteration_rows, mode_told, used_rows
from autorl_hpc.report.run_story import context
from autorl_hpc.report.run_story.story import MAX_PAIRED, shown_lines, shown_settings, tell
from autorl_hpc.report.story_records import (
    EvidenceLine,
    Iteration,
    ReferenceMetrics,
    ResourcesUsed,
    RouteTold,
    Setting,
    Story,
)
from autorl_hpc.report.summary import RunSummary
from autorl_hpc.states import EntryKind, FailureKind, Route, Split

no_fsync, tree = make.no_fsync, make.tree


def asked(run: TreeRun, *calls: tuple[float, int, int, float | None]) -> None:
    """Requests that the gateway counted: when, tokens in and out, cost."""
    writer = LogWriter(run.dir.driver_log)
    asks: dict[str, Any] = {"at": "x", "dialect": "anthropic", "path": "/v1/messages"}
    for number, (at_s, tokens_in, tokens_out, cost) in enumerate(calls, 1):
        counted = {"tokens_in": tokens_in, "tokens_out": tokens_out, "tokens_cached": 0, "cost_usd": cost}
        writer.write(
            DriverCall(**asks, **counted, number=number, status=200, elapsed_s=at_s).model_dump_json().encode()
        )
    writer.write(DriverCall(**asks, number=99, status=403, refused="hosted_tool").model_dump_json().encode())


def test_what_the_gateway_counted_stands_in_place_of_the_agents_word(tree: Tree) -> None:
    run = recorded_run(tree)
    before = told(run).story.resources
    assert (before.tokens_from, before.cost_from, before.calls_refused) == ("trace", "trace", None)
    asked(run, (10.0, 5000, 100, 1.0), (390.0, 7000, 200, 2.0))
    story = told(run).story
    used = story.resources
    assert (used.tokens_in, used.tokens_out, used.cost_usd, used.driver_calls) == (12000, 300, 3.0, 2)
    assert (used.tokens_from, used.cost_from, used.calls_refused) == ("gateway", "gateway", 1)
    assert used.tool_calls == before.tool_calls
    assert story.iterations[0].tokens == 5100
    shown = [row.says for row in used_rows(used)]
    assert "counted by the gateway, at the experiment's prices" in shown and "1 refused by the gateway" in shown


def test_iterations_by_hand(tree: Tree) -> None:
    run = recorded_run(tree).seal(600.0).close(outcomes(100, range(45)))
    story = told(run).story
    first, second, third = story.iterations
    assert (first.status, first.score, first.improvement) == ("refused", None, None)
    assert (second.score, second.improvement) == (30.0, 5.0)
    assert (third.score, third.improvement) == (50.0, 25.0)
    assert (second.route.planned, second.route.executed) == (Route.SFT, Route.SFT)
    assert story.route.executed is Route.SFT and "train.py" in second.route.planned_by[0].where
    rates = [s.value for one in story.iterations for s in one.settings if s.name == "learning_rate"]
    assert [float(rate) for rate in rates] == [2e-5, 1e-5, 5e-6]
    assert [one.duration_s for one in story.iterations] == [50.0, 50.0, 300.0]
    # The second solves items 0 to 11, the third 5 to 24, the base model 0 to 9.
    assert (second.won, second.lost) == (2, 0)
    assert (third.won, third.lost) == (15, 5)
    assert second.improvement_low is not None and second.improvement_low < 5.0 < (second.improvement_high or 0.0)
    assert [one.tokens for one in story.iterations] == [1050, 1050, 3120]
    assert [one.cost_usd for one in story.iterations] == [0.25, 0.25, 0.75]
    assert [one.gpu_hours for one in story.iterations] == pytest.approx([50 / 3600, 100 / 3600, 400 / 3600])
    assert [one.training_steps for one in story.iterations] == [None, 2, 9]
    assert [one.last_loss for one in story.iterations] == [None, 1.0, 0.5]
    assert third.revision not in (None, second.revision)
    assert story.resources.gpu_hours == pytest.approx(600 / 3600) and story.resources.gpus == "1"
    assert (story.resources.tokens_in, story.resources.tokens_out, story.resources.tool_calls) == (3000, 120, 1)
    assert story.resources.revisions == 3 and story.resources.memory_peak_bytes == 9
    assert story.metrics.first_valid_idx == 2 and story.metrics.last_submit_gap == 200.0
    assert story.nodes and story.nodes[0].startswith("supervisor on ") and story.versions["engine: tiny"] == "1"
    assert story.recorder == ()


@pytest.mark.parametrize(("turned", "deleted"), [(False, False), (True, True)])
def test_stages_that_are_submitted_one_by_one_are_one_plan(turned: bool, deleted: bool, tree: Tree) -> None:
    run = tree.run(agent="codex", driver="gpt-x").start()
    grpo = SFT.replace("SFT", "GRPO").replace('model=os.environ["MODEL_PATH"]', 'model="output/v1"')
    code = {"code/train_sft.py": SFT, "code/train_grpo.py": grpo}
    names = ["train_sft.py", "train_grpo.py"]
    for place, name in enumerate(reversed(names) if turned else names):
        begin_s = 100.0 * place
        command = f"/venv/bin/python -m accelerate.commands.launch code/{name} --share 0.8"
        make.add(run, "processes", make.process(begin_s + 10.0, command))
        make.add(run, "processes", make.process(begin_s + 11.0, f"/venv/bin/python3 code/{name} --share 0.8"))
        run.submit(begin_s + 50.0, outcomes(40, range(12 + place)), code_revision=make.code(run, begin_s + 5.0, code))
        if deleted:
            del code[f"code/{name}"]
    make.code(run, 300.0, {**code, "code/notes.py": "x = 1\n"})
    story = told(run.seal(600.0).close(outcomes(100, range(45)))).story
    assert {one.route.planned for one in story.iterations} == {Route.SFT, Route.GRPO}
    assert story.route.planned is Route.SFT_RL
    assert {line.where.partition(":")[0] for line in story.route.planned_by} == set(names)


def diff_of(one: Iteration) -> str:
    return "\n".join(change.diff or "" for change in one.changes)


def test_changes_from_one_iteration_to_the_next(tree: Tree) -> None:
    first, second, third = told(recorded_run(tree)).story.iterations
    assert [(c.path, c.added, c.removed, c.what) for c in first.changes] == [
        ("code/old.py", 1, 0, "added"),
        ("code/train.py", 6, 0, "added"),
    ]
    assert [(c.path, c.added, c.removed, c.what) for c in second.changes] == [
        ("code/old.py", 0, 1, "removed"),
        ("code/train.py", 1, 1, "changed"),
    ]
    old, train = ((change.diff or "").split("\n") for change in second.changes)
    assert (
        "-x = 1" in old and '-args = SFTConfig(output_dir="output/v1", learning_rate=2e-5, num_train_epochs=1)' in train
    )
    (change,) = third.changes
    assert "learning_rate=5e-6" in str(change.diff)
    assert KEY not in diff_of(first) and 'HF_TOKEN"] = "***"' in diff_of(first)


def test_waits_are_from_entry_to_entry(tree: Tree) -> None:
    run = tree.run(seed=5).start()
    number = run.submit(10.0)
    time.sleep(0.05)
    run.score(number, outcomes(40, range(5)))
    run.submit(20.0)
    story = told(run).story
    waited = story.iterations[0].waited_s
    assert waited is not None and 0.04 < waited < PATIENCE_S and story.resources.wait_s == waited
    assert story.iterations[1].waited_s is None


def test_the_merged_report_keeps_figures_and_drops_words(tree: Tree) -> None:
    run = recorded_run(tree).seal(600.0).close(outcomes(100, range(45)))
    demotree.write_all(report.build([tree.path]))
    own = json.loads((run.dir.report / "summary.json").read_text())
    merged = json.loads((tree.path / "report" / "summary.json").read_text())["runs"][0]
    assert own["story"]["iterations"][1]["changes"][0]["diff"]
    short = merged["story"]["iterations"][1]
    assert short["changes"] == [] and short["settings"] == []
    for name in ("score", "improvement", "improvement_low", "tokens", "cost_usd", "gpu_hours", "training_steps", "won"):
        assert short[name] == own["story"]["iterations"][1][name]
    assert merged["story"]["metrics"] == own["story"]["metrics"]


@pytest.mark.parametrize("source", ["agent.log", "traces/session.jsonl"])
def test_what_a_trace_tells_of_failures_is_told(source: str, tree: Tree) -> None:
    run = tree.run(agent="claude-code", driver="x").start()
    trace = 'Traceback (most recent call last):\n  File "/w/code/train.py", line 2, in <module>\nImportError: no trl'
    line = json.dumps({"type": "user", "message": {"content": [{"type": "tool_result", "content": trace}]}}) + "\n"
    own = line if source == "agent.log" else ""
    run.dir.agent_log.write_text(own + '{"type": "assistant", "text": "rollout failed"}\n' * 1000)
    make.add(
        run,
        "trace",
        make.event(50.0, "tool_call", tool="Bash", command="cd code && python train.py", call_id="1", source=source),
        make.event(51.0, "tool_result", call_id="1", ok=False, text=trace.replace("\n", "\\n"), source=source),
    )
    failure = told(run.seal(600.0)).story.failure
    assert failure is not None and failure.kind == "early coding failure"
    says = [(line.where.split(",")[0], line.says) for line in failure.evidence]
    assert says[0] == (source, "ImportError: no trl")
    assert says[1] == ("process at 51 s", "failed: cd code && python train.py")


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
    (note,) = (note for note in forged.notes if note.startswith("planned sft"))
    assert "executed grpo" in note and "train.py" in note and "GRPOTrainer" in note and KEY not in note
    assert "planned sft, executed grpo" in mode_told(forged)
    assert not any("planned" in note for note in honest.notes)


def test_what_was_observed_tells_route_settings_and_steps_of_a_run_without_logs(tree: Tree) -> None:
    run = tree.run(agent="codex", mode="sft-only").start()
    grpo = SFT.replace("SFT", "GRPO").replace("learning_rate=2e-5", "learning_rate=pick(x)")
    revision = make.code(run, 40.0, {"code/train.py": grpo})
    name = "trl.trainer.sft_trainer.SFTTrainer"
    facts: dict[str, Any] = {"name": name, "arguments": {"learning_rate": 3e-4}, "rows": 264}
    told_by = [
        ("trainer", {**facts, "phase": "began"}),
        ("steps", {"first": 1, "last": 30, "count": 30, "rates": [3e-4, 0.0], "from_s": 61.0}),
        ("trainer", {**facts, "phase": "ended", "steps": 30}),
    ]
    make.add(
        run,
        "observed",
        *(
            ObservedFact(
                pid=7, program="code/train.py", at="x", elapsed_s=60.0 + n, at_s=60.0 + n, what=what, facts=given
            )
            for n, (what, given) in enumerate(told_by)
        ),
    )
    run.submit(100.0, outcomes(40, range(12)), code_revision=revision)
    summary = told(run.seal(600.0).close(outcomes(100, range(45))))
    (one,) = summary.story.iterations
    assert (one.route.planned, one.route.executed, one.route.source) == (Route.GRPO, Route.SFT, "observed")
    assert (one.training_steps, one.rows) == (30, 264) and summary.story.trained and summary.story.mode_kept
    assert [(s.value, s.source) for s in one.settings if s.name == "learning_rate"] == [("0.0003", "observed")]
    assert any(note.startswith("planned grpo") and "executed sft" in note for note in summary.notes)


def test_a_diff_is_bounded_cleaned_and_hides_what_is_held_out(tree: Tree) -> None:
    run = tree.run(seed=1).start()
    many = {f"code/f{i:03d}.py": "a\n" for i in range(context.MAX_CHANGES + 7)}
    long = "".join(f"line {i}\n" for i in range(2500))
    revision = make.code(run, 1.0, {**many, "code/a.py": long})
    run.submit(2.0, outcomes(40, range(10)), code_revision=revision)
    hostile = "\x1b[31mred\x1b]0;title\x07 \u202egnp.exe\r\n" + "y" * 10_000
    leak = {"code/hostile.py": hostile, "code/leak.py": "the question itself\n", "code/\x1b[1m\nodd|.py": "z\n"}
    run.submit(3.0, outcomes(40, range(10)), code_revision=make.code(run, 2.5, {**many, **leak}))
    found = (Contaminated(file="code/leak.py", split=Split.REPORT, how="exact", items=1, first_items=("q7",)),)
    look = Contamination(submission_id=2, whole={Split.REPORT: 1}, items={Split.REPORT: 1}, found=found, complete=True)
    run.write(EntryKind.CONTAMINATION, look)
    first, second = told(run).story.iterations
    assert len(first.changes) == context.MAX_CHANGES and first.more_changes == 8
    assert max(len(str(change.diff).split("\n")) for change in first.changes) == context.MAX_DIFF_LINES + 1
    shown = diff_of(second)
    assert "question itself" not in shown and "held-out items were found" in shown
    assert not set("\x1b\x07\r\u202e") & set(shown + "".join(c.path for c in second.changes))
    assert max(map(len, shown.split("\n"))) <= context.MAX_LINE_CHARS
    assert any(c.path == "code/ odd|.py" for c in second.changes)


def test_more_found_than_is_listed_hides_all_words(tree: Tree) -> None:
    run = recorded_run(tree)
    look = Contamination(submission_id=1, found_unlisted=3, complete=True)
    run.write(EntryKind.CONTAMINATION, look)
    story = told(run).story
    assert all("SFTConfig" not in diff_of(one) for one in story.iterations)
    assert all("SFT" not in line.says for one in story.iterations for line in one.route.planned_by)


def test_a_run_that_nobody_recorded(tree: Tree) -> None:
    run = told(tree.finished(seed=0, solved=40))
    story = run.story
    assert story.route.planned is Route.UNKNOWN and story.resources == ResourcesUsed(wait_s=story.resources.wait_s)
    assert story.recorder == ()
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
    queued = told(tree.run(seed=1)).story
    assert queued.iterations == () and queued.route == RouteTold() and queued.failure is None
    assert queued.metrics == ReferenceMetrics()


@pytest.mark.parametrize("name", ["trace", "usage", "processes", "training", "revisions"])
def test_a_damaged_file_costs_only_what_stood_in_it(tree: Tree, name: str) -> None:
    run = recorded_run(tree).seal(600.0).close(outcomes(100, range(45)))
    whole = told(run)
    path = run.dir.recorded(name)
    path.write_bytes(b"\x00\xff garbage\n" * 3 + b'{"elapsed_s": 1')
    damaged = told(run)
    assert f"4 lines of {path.name} can't be read" in damaged.story.recorder[0]
    assert damaged.improvement == whole.improvement and damaged.story.metrics == whole.story.metrics
    assert [one.score for one in damaged.story.iterations] == [one.score for one in whole.story.iterations]


def test_damaged_code_is_said(tree: Tree) -> None:
    run = recorded_run(tree)
    for path in (run.dir.code_git / "objects").rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            path.write_bytes(b"damaged")
    story = told(run).story
    assert all(one.changes == () for one in story.iterations)
    assert any("code.git" in note for note in story.recorder)


def test_trainings_that_an_agent_left_at_work_are_named(tree: Tree) -> None:
    """Catches a run whose agent said that it was done and ended, while its trainings worked: nothing told that they were killed."""
    run = recorded_run(tree)
    append_event(run.dir.events, "agent_ended", ended_by="agent_exit", exit_code=0, elapsed_s=500.0, left=[], start=1)
    for pid, command, code in (
        (8, "python train.py --big", -9),
        (9, "torchrun x.py", -9),
        (10, "python done.py", 0),
        (11, "bash", -9),
    ):
        make.add(run, "processes", make.process(501.0, command, "ended", pid=pid, exit_code=code))
    words = "the agent ended while 2 of its programs worked, and they were killed: python train.py --big; torchrun x.py"
    assert told(run).story.recorder[0] == words


def test_what_the_recorder_missed_is_said(tree: Tree) -> None:
    run = recorded_run(tree)
    append_event(run.dir.events, "recorder_trouble", watch="usage", message="nvidia-smi \x1b[31m: no answer")
    for i in range(30):
        append_event(run.dir.events, "recorder_trouble", watch="training", message=f"trouble {i}")
    append_event(run.dir.events, "recorder_started", pid=3)
    seen = {"at": "x", "revision": "0" * 40, "by_name": 3, "reason": f"left out by name: code/{KEY}/.cache"}
    make.add(run, "revisions", CodeRevision.model_validate({"elapsed_s": 500.0, **seen}))
    run.interrupt(450.0)
    run.start(450.0)
    notes = told(run).story.recorder
    assert not any(KEY in note for note in notes)
    assert "recorder trouble: watch usage, message nvidia-smi : no answer" in notes
    assert not any("started" in note for note in notes)
    assert len(notes) == 12 and notes[-1].startswith("and ") and notes[-1].endswith(" more")


def test_of_many_the_selected_one_alone_is_opened(tree: Tree) -> None:
    run = tree.run(seed=4).start()
    for at in range(1, MAX_PAIRED + 2):
        run.submit(float(at), outcomes(40, range(13 if at == 4 else 14 - at % 3)), final=at == 4)
    story = told(run.seal().close(outcomes(100, range(30)))).story
    assert [(one.submission_id, one.won) for one in story.iterations if one.won is not None] == [(4, 3)]
    assert all(one.improvement is not None for one in story.iterations)


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


ITEM = "Leo has 14 pens. Leo buys 17 more and gives away 11. How many pens are left?"
CODE = f"""from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(loss_type={ITEM!r}, learning_rate=1e-5)
GRPOTrainer(model="m", args=args, reward_funcs=[]).train()
"""


def look(run: TreeRun, number: int | None, *found: tuple[str, str, int], **more: Any) -> None:
    """A look that found items: (file, how, number of items)."""
    every = tuple(
        Contaminated(file=file, split=Split.REPORT, how=how, items=items, first_items=("q7",))
        for file, how, items in found
    )
    whole = max((items for _, how, items in found if how == "exact"), default=0)
    most = max((items for _, _, items in found), default=0)
    run.write(
        EntryKind.CONTAMINATION,
        Contamination(
            submission_id=number,
            items={Split.REPORT: most},
            whole={Split.REPORT: whole},
            of={Split.REPORT: 100},
            found=every,
            complete=True,
            **more,
        ),
    )


def leaky_run(tree: Tree, *found: tuple[str, str, int]) -> TreeRun:
    """The item stands in code, in a name, a link, a command, the trace, the log, notes and paths."""
    run = tree.run(agent="leaky").start()
    run.dir.agent_log.write_text(f"Traceback (most recent call last):\n  File 'x.py', line 1\nValueError: {ITEM}\n")
    files = {"code/train.py": CODE, "code/cfg.yaml": f"seed: {ITEM!r}\n", f"code/{ITEM}.py": "x = 1\n"}
    revision = make.code(run, 40.0, files)
    make.add(
        run,
        "trace",
        make.event(10.0, "usage", tokens_in=10, tokens_out=5, model=ITEM),
        make.event(12.0, "tool_call", tool="shell", command=f"python train.py '{ITEM}'", call_id="1"),
    )
    make.add(run, "processes", make.process(20.0, f"python code/train.py {ITEM}"))
    make.add(run, "processes", make.process(30.0, f"python code/train.py {ITEM}", "ended", exit_code=1))
    make.add(run, "training", make.point(25.0, 1, trainer="GRPOTrainer", reward=0.1, source=f"output/{ITEM}/log"))
    run.submit(50.0, outcomes(40, range(9)), code_revision=revision, note=ITEM, model_path=f"output/{ITEM}")
    run.refuse(60.0, f"model_path: output/{ITEM}: No such file or directory", code="no_such_folder", note=ITEM)
    look(run, 1, *found)
    return run


@pytest.mark.parametrize(
    "found",
    [
        (
            ("data/items.txt", "exact", 9),
            ("agent.log", "exact", 4),
            ("code/train.py", "exact", 3),
            ("code/cfg.yaml", "exact", 1),
            ("./", "exact", 2),
        ),
        (("code/train.py", "ngram", 1), ("code/cfg.yaml", "exact", 1), ("agent.log", "ngram", 1), ("./", "ngram", 1)),
    ],
)
def test_no_page_holds_a_held_out_item(tree: Tree, found: tuple[tuple[str, str, int], ...]) -> None:
    run = leaky_run(tree, *found)
    run.seal(100.0).close(outcomes(100, range(20)))
    clean = tree.run(agent="other").start()
    clean.submit(50.0, outcomes(40, range(9)), note=f"a note, token={KEY}", model_path="output/v1")
    demotree.write_all(report.build([tree.path]))
    pages = [page for page in tree.path.rglob("*") if page.is_file() and "report" in page.parts[len(tree.path.parts) :]]
    texts = [page.read_text(errors="replace") for page in pages]
    assert len(texts) > 4 and not [page for page, text in zip(pages, texts, strict=True) if "14 pens" in text]
    assert any("a note, token=***" in text for text in texts), "of a run in which nothing was found, notes are shown"
    assert not any(KEY in text for text in texts)


def test_a_file_that_holds_none_is_shown_and_the_words_around_it_are_not(tree: Tree) -> None:
    run = leaky_run(tree, ("data/items.txt", "exact", 1))
    summary = told(run)
    first, second = summary.story.iterations
    assert "+seed: " in diff_of(first), "a look read that file and found nothing"
    assert {s.name: s.value for s in first.settings}["loss_type"] == IN_WORKSPACE, "its words may be another file's"
    assert {s.name: s.value for s in first.settings}["learning_rate"] == "1e-05"
    assert first.route.executed_by[0].where == f"output/{ITEM}/log, 25 s to 25 s"
    assert [p.note for p in summary.trajectory] == [IN_WORKSPACE, IN_WORKSPACE]
    assert summary.trajectory[1].reason == f"no_such_folder {IN_WORKSPACE}"
    assert second.failure is not None and second.failure.kind is FailureKind.ARTIFACT_REFUSED
    assert ITEM not in second.failure.model_dump_json() and "no_such_folder" in second.failure.evidence[0].says
    assert summary.story.versions["driver's model, by the trace"] == IN_WORKSPACE


def test_whole_items_in_code_are_one_and_the_evidence_says_so(tree: Tree) -> None:
    run = leaky_run(tree, ("code/train.py", "exact", 3), ("code/many.py", "ngram", 30)).seal(100.0)
    run.close(outcomes(100, range(20)))
    story = told(run).story
    for failure in (story.iterations[0].failure, story.failure):
        assert failure is not None and failure.kind is FailureKind.HELD_OUT_ITEMS
        assert [line.says for line in failure.evidence] == [
            "3 held-out items whole in the workspace",
            "code/train.py: 3 held-out items, whole",
        ]


def test_what_is_hidden() -> None:
    def of(*files: str, **more: Any) -> Contamination:
        found = tuple(Contaminated(file=file, split=Split.REPORT, how="ngram", items=1) for file in files)
        return Contamination(found=found, complete=True, **more)

    assert hidden_of([of(), of()]).said("a note") == "a note"
    plain = hidden_of([of("code/leak.py"), of("agent.log")])
    assert plain.file("code/leak.py") and not plain.file("code/train.py") and not plain.names
    for where in ("leak.py:3", "code/leak.py:3", "agent.log, byte 9"):
        assert plain.instead(where) == IN_FILE
    for where in ("process", "process at 9 s", "run.py#inline.py:1", ""):
        assert plain.instead(where) == IN_WORKSPACE
    for where in ("ledger: submission 3", "ledger entry 000012", "report split", "train.py:3"):
        assert plain.instead(where) is None
    assert hidden_of([of("code/\\x1bodd.py")]).instead("train.py:3") == IN_WORKSPACE, "told in another way elsewhere"
    assert hidden_of([of(found_unlisted=1)]).instead("train.py:3") == IN_WORKSPACE
    names = hidden_of([of("./")])
    assert names.place("ledger: sealed.py:3") == names.place("train.py:3") == NAME
    assert names.place("ledger: sealed") == "ledger: sealed"


def test_the_same_checkpoint_again_has_the_route_of_the_first(tree: Tree) -> None:
    run = tree.run(agent="a", mode="rl-only").start()
    grpo = make.code(run, 10.0, {"code/train.py": CODE})
    make.add(run, "training", *(make.point(20.0 + i, i, trainer="GRPOTrainer", reward=0.1 * i) for i in range(1, 5)))
    first = run.submit(50.0, outcomes(40, range(30)), code_revision=grpo)
    sft = make.code(run, 60.0, {"code/train.py": "from trl import SFTTrainer\nSFTTrainer(model='m').train()\n"})
    make.add(run, "training", *(make.point(70.0 + i, i, trainer="SFTTrainer", loss=1.0 / i) for i in range(1, 5)))
    run.submit(90.0, outcomes(40, range(20)), code_revision=sft)
    run.submit(95.0, None, code_revision=sft, same_as=first, final=True)
    run.seal(100.0).close(outcomes(100, range(70)))
    summary = told(run)
    one, two, again = summary.story.iterations
    assert again.route == one.route and again.settings == one.settings and one.route.executed is Route.GRPO
    assert two.route.executed is not Route.GRPO
    assert summary.story.mode_kept is True


def test_what_was_trained_before_the_same_checkpoint_came_again_is_told(tree: Tree) -> None:
    """An expert whose RL gave nothing better submits what it had before: the page must not say that there was no RL."""
    run = tree.run(agent="a").start()
    code = make.code(run, 10.0, {"code/train.py": "from trl import SFTTrainer\nSFTTrainer(model='m').train()\n"})
    make.add(run, "training", *(make.point(20.0 + i, i, trainer="SFTTrainer", loss=1.0 / i) for i in range(1, 5)))
    first = run.submit(50.0, outcomes(40, range(30)), code_revision=code)
    make.add(
        run, "training", *(make.point(60.0 + i, source="agent.log", reward=0.1 * i, loss=0.5) for i in range(1, 9))
    )
    run.submit(95.0, None, code_revision=code, same_as=first, final=True)
    summary = told(run)
    one, again = summary.story.iterations
    assert again.route.executed is one.route.executed is Route.SFT
    (line,) = again.route.executed_by[len(one.route.executed_by) :]
    assert line.where.endswith("61 s to 68 s")
    assert "reward 0.1 to 0.8" in line.says and line.says.endswith(f"they are those of submission {first}")
    rows = {row.name: row for row in iteration_rows(again)}
    assert "training steps" not in rows and "last reward 0.8" in rows["training"].shown
