"""Held-out text that an agent put into every place that a report quotes: none of it is shown, and what the report itself says is."""

from __future__ import annotations

from typing import Any

import pytest
import recordmaker as make
import toldruns
from toldruns import KEY, told
from treemaker import Tree, TreeRun, outcomes

from autorl_hpc.records.entries import Contaminated, Contamination
from autorl_hpc.report import report
from autorl_hpc.report.hidden_items import IN_FILE, IN_WORKSPACE, NAME, hidden_of
from autorl_hpc.report.run_page import iteration_rows
from autorl_hpc.states import EntryKind, FailureKind, Route, Split

ITEM = "Leo has 14 pens. Leo buys 17 more and gives away 11. How many pens are left?"
CODE = f"""from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(loss_type={ITEM!r}, learning_rate=1e-5)
GRPOTrainer(model="m", args=args, reward_funcs=[]).train()
"""


no_fsync, tree = toldruns.no_fsync, toldruns.tree


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
    report.write_all(report.build([tree.path]), None)
    pages = [page for page in tree.path.rglob("*") if page.is_file() and "report" in page.parts[len(tree.path.parts) :]]
    texts = [page.read_text(errors="replace") for page in pages]
    assert len(texts) > 4 and not [page for page, text in zip(pages, texts, strict=True) if "14 pens" in text]
    assert any("a note, token=***" in text for text in texts), "of a run in which nothing was found, notes are shown"
    assert not any(KEY in text for text in texts)


def test_a_file_that_holds_none_is_shown_and_the_words_around_it_are_not(tree: Tree) -> None:
    run = leaky_run(tree, ("data/items.txt", "exact", 1))
    summary = told(run)
    first, second = summary.story.iterations
    assert first.diff is not None and "+seed: " in first.diff, "a look read that file and found nothing"
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
        assert failure is not None and failure.kind is FailureKind.STATIC_SHORTCUT
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
    assert rows["training steps"].shown == "not logged" and "last reward 0.8" in rows["training steps"].says
