"""A part of the feedback split: drawn alike everywhere, by whole clusters, by strata; and what compares with it."""

from __future__ import annotations

import gzip
import hashlib
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from treemaker import Tree, outcomes

from autorl_hpc.errors import AutorlError
from autorl_hpc.evidence.verify import verify_run
from autorl_hpc.files.frozen_records import baseline_key
from autorl_hpc.files.layout import Root
from autorl_hpc.records.entries import Evaluation, Timings
from autorl_hpc.records.run import FeedbackPart, Science, ids_sha256
from autorl_hpc.records.task import SplitPin
from autorl_hpc.scoring import stats
from autorl_hpc.states import Split
from autorl_hpc.supervise.workspace import feedback_text
from autorl_hpc.tasks.heldout import Item, asked_items, draw, pin_part
from autorl_hpc.tasks.loader import load_task

FILE = load_task("arithmetic").file
CLUSTERED = FILE.model_copy(update={"cluster_field": "shop"})
STRATIFIED = FILE.model_copy(update={"stratum_field": "kind"})
ITEMS = [
    Item(f"item-{n:03d}", "?", "!", {"shop": f"shop {n // 7}", "kind": "rare" if n % 10 == 0 else "common"})
    for n in range(200)
]


def ids(items: list[Item]) -> list[str]:
    return [item.id for item in items]


@pytest.mark.parametrize("task", [FILE, CLUSTERED, STRATIFIED])
@pytest.mark.parametrize("wanted", [1, 10, 60, 199])
def test_a_part_is_drawn_by_its_seed_alone(task: Any, wanted: int) -> None:
    part = draw(ITEMS, wanted, 3, task)
    assert ids(draw(list(reversed(ITEMS)), wanted, 3, task)) == ids(part)[::-1], "whatever the order of the items"
    assert ids(part) == sorted(ids(part)), "in the split's order"
    assert wanted <= len(part) < wanted + (7 if task is CLUSTERED else 1)
    if 10 <= wanted <= 60:
        assert ids(draw(ITEMS, wanted, 4, task)) != ids(part)


def test_clusters_are_whole_and_strata_keep_their_shares() -> None:
    sizes = Counter(item.data["shop"] for item in ITEMS)
    drawn = Counter(item.data["shop"] for item in draw(ITEMS, 60, 0, CLUSTERED))
    assert all(sizes[shop] == count for shop, count in drawn.items())
    assert Counter(item.data["kind"] for item in draw(ITEMS, 60, 0, STRATIFIED)) == {"rare": 6, "common": 54}


def test_the_known_draw_stays() -> None:
    """Records of launched runs pin it: another order of the hashes would refuse to grade them."""
    assert ids(draw(ITEMS, 4, 0, FILE)) == KNOWN


KNOWN = ["item-007", "item-052", "item-133", "item-134"]


def a_tree(tmp: Path) -> tuple[Tree, Science, FeedbackPart]:
    """A tree of runs whose 40 feedback items are a part of 90."""
    tree = Tree(tmp / "runs" / "exp")
    whole = tree.science()
    names = [row["id"] for row in rows_of(tree, tree.baseline(whole, Split.FEEDBACK).key)]
    part = FeedbackPart(items=40, seed=0, n=40, sha256=ids_sha256(names))
    pins = {**whole.splits, "feedback": SplitPin(n=90, sha256=whole.splits["feedback"].sha256)}
    return tree, whole.model_copy(update={"splits": pins}), part


def rows_of(tree: Tree, key: str) -> list[dict[str, Any]]:
    data = gzip.decompress((tree.experiment.baselines / f"{key}.items.jsonl.gz").read_bytes())
    return [json.loads(line) for line in data.splitlines()]


def test_a_part_makes_another_run_and_another_base_and_nothing_else_changes(tmp_path: Path) -> None:
    _, whole, part = a_tree(tmp_path)
    assert "feedback_part" not in json.loads(whole.canonical()), "run ids of old experiments stay"
    other = whole.model_copy(update={"feedback_part": part})
    assert other.run_id() != whole.run_id()
    assert (whole.asked(Split.FEEDBACK), other.asked(Split.FEEDBACK), other.asked(Split.REPORT)) == (90, 40, 100)
    for split, same in ((Split.FEEDBACK, False), (Split.REPORT, True)):
        assert (baseline_key(whole, split, "e" * 64) == baseline_key(other, split, "e" * 64)) is same
        assert (whole.split_hash(split) == other.split_hash(split)) is same
    assert "40 of 90 items" in feedback_text(other) and "90 items" in feedback_text(whole)


def test_verify_sees_a_score_of_other_items_than_the_part_s(tmp_path: Path) -> None:
    tree, science, part = a_tree(tmp_path)

    def problems(part: FeedbackPart) -> list[str]:
        changes: dict[str, Any] = {"feedback_part": part, "splits": science.splits, "seed": part.seed}
        run = tree.run(**changes).start()
        run.submit(1.0, outcomes(40, range(20)))
        run.seal().close(outcomes(100, range(40)))
        return verify_run(tree.experiment, run.dir).problems

    assert problems(part) == []
    assert any(
        "40 items of the feedback split" in each
        for each in problems(part.model_copy(update={"sha256": "0" * 64, "seed": 1}))
    )


def test_a_grader_that_draws_another_part_refuses(tmp_path: Path) -> None:
    root = Root(tmp_path)
    folder = root.task_vault("arithmetic") / "feedback"
    folder.mkdir(parents=True)
    data = b"".join(json.dumps({"id": f"i{n}", "question": "?", "answer": "!"}).encode() + b"\n" for n in range(9))
    (folder / "items.jsonl").write_bytes(data)
    pin = SplitPin(n=9, sha256=hashlib.sha256(data).hexdigest())
    items = [Item(f"i{n}", "?", "!") for n in range(9)]
    part = pin_part(items, 4, 0, FILE)
    assert part is not None and part.n == 4 and pin_part(items, 9, 0, FILE) is None
    science = Tree(tmp_path / "runs" / "exp").science(splits={"feedback": pin, "report": pin}, feedback_part=part)
    assert len(asked_items(root, science, Split.FEEDBACK, FILE)) == 4
    wrong = science.model_copy(update={"feedback_part": part.model_copy(update={"seed": 1})})
    with pytest.raises(AutorlError, match="another part is drawn here"):
        asked_items(root, wrong, Split.FEEDBACK, FILE)


def test_hashes_of_older_records_stay() -> None:
    """They bind base models' scores to closed chains."""
    old = {"load_s": 1.0, "swap_s": 0.0, "generate_s": 2.0, "score_s": 0.0, "commit_s": 0.0}
    assert Timings.model_validate(old).model_dump(mode="json") == old
    assert "waiting_s" in Timings(waiting_s=0.0).model_dump(mode="json")
    evaluation = Evaluation(split=Split.FEEDBACK, content_hash="0" * 64, score=1.0, recipe_hash="1" * 64)
    assert "standard_error" not in evaluation.model_dump(mode="json")


def test_standard_errors() -> None:
    binary = [1.0] * 30 + [0.0] * 70
    assert stats.standard_error(binary) == pytest.approx((0.3 * 0.7 / 99) ** 0.5)
    assert stats.standard_error(binary, [str(n // 10) for n in range(100)]) == pytest.approx(
        statistics.stdev([1.0] * 3 + [0.0] * 7) / 10**0.5
    )
    assert stats.standard_error([]) is None
    for alike in ([0.0] * 20, [1.0] * 20, [1.0]):
        assert (stats.standard_error(alike) or 0) > 0, "never 0 because nothing varied"
