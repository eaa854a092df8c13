"""A run with everything that a recorder leaves, told: by its iterations, in its summary and in the merged one."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import recordmaker as make
import toldruns
from helpers import PATIENCE_S
from toldruns import KEY, SFT, recorded_run, told
from treemaker import Tree, TreeRun, outcomes

from autorl_hpc.files.safe_open import DriverCall, LogWriter
from autorl_hpc.report import report
from autorl_hpc.report.run_page import used_rows
from autorl_hpc.report.story_records import SkillMetrics, Story
from autorl_hpc.states import Route

no_fsync, tree, whole = toldruns.no_fsync, toldruns.tree, toldruns.whole


def asked(run: TreeRun, *calls: tuple[float, int, int, float | None]) -> None:
    """Requests that the gateway counted: when, tokens in and out, cost."""
    writer = LogWriter(run.dir.driver_log)
    for number, (at_s, tokens_in, tokens_out, cost) in enumerate(calls, 1):
        fields: dict[str, Any] = {
            "at": "x",
            "number": number,
            "dialect": "anthropic",
            "path": "/v1/messages",
            "status": 200,
        }
        counted = {"tokens_in": tokens_in, "tokens_out": tokens_out, "tokens_cached": 0, "cost_usd": cost}
        writer.write(DriverCall(**fields, **counted, elapsed_s=at_s).model_dump_json().encode())
    refused = DriverCall(at="x", number=99, dialect="anthropic", path="/v1/messages", status=403, refused="hosted_tool")
    writer.write(refused.model_dump_json().encode())


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


def test_without_prices_the_cost_is_the_agents_word(tree: Tree) -> None:
    run = recorded_run(tree)
    asked(run, (10.0, 5000, 100, None))
    used = told(run).story.resources
    assert (used.tokens_in, used.cost_usd, used.tokens_from, used.cost_from) == (5000, 0.75, "gateway", "trace")


def test_iterations_by_hand(whole: TreeRun) -> None:
    story = told(whole).story
    assert told(whole).story == story == Story.model_validate_json(story.model_dump_json())
    first, second, third = story.iterations
    assert (first.status, first.score, first.improvement, first.best_so_far) == ("refused", None, None, None)
    assert (second.score, second.improvement, second.best_so_far) == (30.0, 5.0, 30.0)
    assert (third.score, third.improvement, third.best_so_far) == (50.0, 25.0, 50.0)
    assert [one.duration_s for one in story.iterations] == [50.0, 50.0, 300.0]
    # The second solves items 0 to 11, the third 5 to 24, the base model 0 to 9.
    assert (second.won, second.lost, second.won_ids) == (2, 0, ("q10", "q11"))
    assert (third.won, third.lost, third.lost_ids) == (15, 5, ("q0", "q1", "q2", "q3", "q4"))
    assert second.improvement_low is not None and second.improvement_low < 5.0 < (second.improvement_high or 0.0)
    assert [one.tokens for one in story.iterations] == [1050, 1050, 3120]
    assert [one.cost_usd for one in story.iterations] == [0.25, 0.25, 0.75]
    assert [one.gpu_hours for one in story.iterations] == pytest.approx([50 / 3600, 100 / 3600, 400 / 3600])
    assert [one.training_steps for one in story.iterations] == [None, 2, 9]
    assert [one.last_loss for one in story.iterations] == [None, 1.0, 0.5]
    assert third.revision not in (None, second.revision) and len(story.opened) == 2
    assert story.resources.gpu_hours == pytest.approx(600 / 3600) and story.resources.gpus == "1"
    assert (story.resources.tokens_in, story.resources.tokens_out, story.resources.tool_calls) == (3000, 120, 1)
    assert story.resources.revisions == 3 and story.resources.memory_peak_bytes == 9
    assert story.metrics.first_valid_idx == 2 and story.metrics.last_submit_gap == 200.0
    assert story.skill == SkillMetrics(without_human_help=True, recovered_from=2, stage_reached="evaluation")
    assert story.nodes and story.nodes[0].startswith("supervisor on ") and story.versions["engine: tiny"] == "1"
    assert story.recorder == ()


def test_routes_and_settings_of_the_code(whole: TreeRun) -> None:
    story = told(whole).story
    second, third = story.iterations[1:]
    assert (second.route.planned, second.route.executed) == (Route.SFT, Route.SFT)
    assert story.route.executed is third.route.executed is Route.SFT
    rates = [s.value for one in story.iterations for s in one.settings if s.name == "learning_rate"]
    assert [float(rate) for rate in rates] == [2e-5, 1e-5, 5e-6]
    assert second.route.planned_by and "train.py" in second.route.planned_by[0].where


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("deleted", [False, True])
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


def test_two_trainings_of_the_base_model_are_two_plans(tree: Tree) -> None:
    run = tree.run(agent="codex", driver="gpt-x").start()
    sft = SFT.replace('os.environ["MODEL_PATH"]', '"models/base"')
    code = {"code/train_sft.py": sft, "code/train_grpo.py": sft.replace("SFT", "GRPO")}
    for place, name in enumerate(("train_sft.py", "train_grpo.py")):
        make.add(run, "processes", make.process(100.0 * place + 10.0, f"python code/{name}"))
        revision = make.code(run, 100.0 * place + 5.0, code)
        run.submit(100.0 * place + 50.0, outcomes(40, range(12 + place)), code_revision=revision)
    assert told(run.seal(600.0).close(outcomes(100, range(45)))).story.route.planned is Route.GRPO


def test_changes_from_one_iteration_to_the_next(whole: TreeRun) -> None:
    first, second, third = told(whole).story.iterations
    found = [[(c.path, c.added, c.removed, c.what) for c in one.changes] for one in (first, second)]
    assert found[0] == [("code/old.py", 1, 0, "added"), ("code/train.py", 6, 0, "added")]
    assert found[1] == [("code/old.py", 0, 1, "removed"), ("code/train.py", 1, 1, "changed")]
    assert second.diff is not None and third.diff is not None
    old = '-args = SFTConfig(output_dir="output/v1", learning_rate=2e-5, num_train_epochs=1)'
    assert {"-x = 1", old} <= set(second.diff.split("\n"))
    assert "learning_rate=5e-6" in third.diff and "old.py" not in third.diff
    assert KEY not in first.diff and 'HF_TOKEN"] = "***"' in first.diff if first.diff else False


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


def test_the_merged_report_keeps_figures_and_drops_words(whole: TreeRun) -> None:
    report.refresh([whole.tree.path])
    own = json.loads((whole.dir.report / "summary.json").read_text())
    merged = json.loads((whole.tree.path / "report" / "summary.json").read_text())["runs"][0]
    assert own["story"]["iterations"][1]["diff"] and own["story"]["iterations"][1]["won_ids"]
    short = merged["story"]["iterations"][1]
    assert short["diff"] is None and short["changes"] == [] and short["won_ids"] == [] and short["settings"] == []
    for name in ("score", "improvement", "improvement_low", "tokens", "cost_usd", "gpu_hours", "training_steps", "won"):
        assert short[name] == own["story"]["iterations"][1][name]
    assert merged["story"]["metrics"] == own["story"]["metrics"]


@pytest.mark.slow
def test_a_long_run_is_told_quickly(tree: Tree) -> None:
    run = tree.run(seed=7).start()
    for number in range(1, 51):
        run.submit(200.0 * number, outcomes(40, range(number % 20)))
    make.add(run, "training", *(make.point(5.0 * i, i, loss=1.0) for i in range(2000)))
    make.add(run, "trace", *(make.event(10.0 * i, "usage", tokens_in=9, tokens_out=1) for i in range(1000)))
    make.add(run, "usage", *(make.usage(5.0 * i, 4.0 * i, (0.5,)) for i in range(2000)))
    took = []
    for _ in range(3):  # the first imports, and makes adapters of the records
        began = time.process_time()
        told(run)
        took.append(time.process_time() - began)
    assert min(took) < 2.0  # some 40 ms on a core of its own


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
