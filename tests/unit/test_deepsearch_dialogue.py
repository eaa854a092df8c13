"""ReAct's loop: the reference's stop string hides every action, ours doesn't; prompts, actions, and whole episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import science_of
from players import Player

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root
from autorl_hpc.grading.evaluate import Playground
from autorl_hpc.records.run import Science
from autorl_hpc.rollouts.environment import Transcript, Turn
from autorl_hpc.rollouts.search import Dialogue
from autorl_hpc.rollouts.search.search_environment import LAST, PROMPT, STOP, SYSTEM, THOUGHT, parse
from autorl_hpc.rollouts.source import load
from autorl_hpc.scoring.outcome import Context
from autorl_hpc.scoring.registry import scorer
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.states import Fault
from autorl_hpc.tasks.heldout import Item, load_items
from autorl_hpc.tasks.loader import Task, load_task

# --- the stop string ---


ACTIONS = [
    ("x\nAction: search[a b]", "search", "a b"), ("x Action: search[a b] more", "search", "a b"),
    ("Action:search[a]", "search", "a"), ("action: Search [a]", "search", "a"),
    ("**Action:** answer[Paris]", "answer", "Paris"), ("search[a]", "search", "a"),
    ("answer[Paris]\n", "answer", "Paris"), ("Action: answer[a [b] c]", "answer", "a [b] c"),
    ("Action: answer[[a]]", "answer", "[a]"), ("Action: answer[a] because of [1]", "answer", "a"),
    ("Action: answer[a [b]\nnext line", "answer", "a [b"), ("Action: answer[a,\n b,\n c]", "answer", "a, b, c"),
    ("Action: search[first]\nAction: answer[second]", "search", "first"),
    ("Action: search[a\u2028b]", "search", "a b"), ("Action: search[]", "", ""), ("Action: answer[  ]", "", ""),
    ("Action: answer[cut off", "", ""), ("Action: answer Paris", "", ""), ("Action: open[a]", "", ""),
    ("I would search[a]", "", ""), ("", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name", "argument"), ACTIONS)
def test_actions_in_all_spellings(text: str, name: str, argument: str) -> None:
    assert parse(text) == (name, argument)
    assert parse(Dialogue().action(text)) == (name, argument), "the dialogue must not change it"


def test_the_prompt_holds_the_episode_word_by_word() -> None:
    goal = {"id": "a", "question": "Who {is} {question}?", "answer_type": "Set Answer"}
    transcript = Transcript(goal, "", [Turn("t\nAction: search[x]", "[1] A: b")])
    prompt = Dialogue({"max_steps": 4}).prompt(transcript)
    head = SYSTEM.replace("{steps}", "4")
    assert prompt == (
        f"{head}\n\nQuestion: Who {{is}} {{question}}?\nAnswer type: Set Answer\n\n"
        "Thought: t\nAction: search[x]\nObservation: [1] A: b\nThought:"
    )
    transcript.turns += [Turn("Action: search[y]", "z")] * 2
    assert Dialogue({"max_steps": 4}).prompt(transcript).endswith(LAST + THOUGHT)
    assert LAST not in Dialogue({"max_steps": 5}).prompt(transcript)


# --- the embedded variant, through the scheduler ---


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> tuple[Root, Task]:
    root = Root(tmp_path_factory.mktemp("root"))
    task = load_task("deepsearchqa-mini")
    stage_task(root, task, None)
    return root, task


def science(task: Task, **options: Any) -> Science:
    return science_of(task, recipe={"options": {**task.file.recipes[0].options, **options}})


def held_out(root: Root, task: Task, split: str) -> list[Item]:
    return load_items(root, task.name, split, task.file.splits[split])  # type: ignore[index]


def follows(items: list[Item], find: bool = True) -> Player:
    """Searches as the items' walkthroughs do, and answers only with what it was shown on the way."""
    seen: dict[str, str] = {}

    def act(prompt: str) -> str:
        (item,) = [item for item in items if f"Question: {item.question}\n" in prompt]
        seen[item.id] = seen.get(item.id, "") + prompt.partition("Answer type:")[2]
        plan = item.data["walkthrough"]
        action = str(plan[prompt.count("\n> ")])
        if action.startswith("answer["):
            found = [part for part in item.answer.split(", ") if not find or part in seen[item.id]]
            return f" answer[{', '.join(found)}]\n"
        return f" {action}\n"

    return Player(act)


@pytest.mark.parametrize("split", ["feedback", "report"])
def test_who_searches_and_reads_gets_100(mini: tuple[Root, Task], split: str) -> None:
    root, task = mini
    items = held_out(root, task, split)
    play = Playground(root)
    try:
        answers, _ = play.play(science(task), items, follows(items))
    finally:
        play.close()
    rater = scorer(task.recipe(None).scorer, task.recipe(None).scorer_version)
    outcomes = rater.score(items, [[answer.text for answer in drawn] for drawn in answers], Context())
    metrics = rater.metrics(items, outcomes)
    assert [outcome.value for outcome in outcomes] == [1.0] * len(items) == [1.0] * 10
    assert metrics["f1"] == metrics["fully_correct"] == metrics["answered"] == 100.0
    assert 3 <= metrics["mean_steps"] <= 4, "no question is answered without at least two searches"


def test_a_corpus_that_is_not_the_recipes_is_the_graders_fault_and_no_score(mini: tuple[Root, Task]) -> None:
    root, task = mini
    items = held_out(root, task, "feedback")
    with pytest.raises(AutorlError, match="the recipe names 000") as caught:
        Playground(root).play(science(task, corpus_sha256="0" * 64), items, follows(items))
    assert caught.value.fault is Fault.GRADER


@pytest.mark.parametrize("name", ["deepsearchqa/task.template.yaml", "deepsearchqa-mini/task.yaml"])
def test_recipes_hold_the_dialogues_words(name: str) -> None:
    tasks = Path(__file__).resolve().parents[2] / "tasks"
    for recipe in yaml.safe_load((tasks / name).read_text())["recipes"]:
        if "mini" in name:
            assert recipe["prompt"] == load(tasks / "deepsearchqa-mini" / "environment.py").PROMPT
        else:
            assert recipe["system"] == SYSTEM
            assert recipe["prompt"] == PROMPT + "{history}" + THOUGHT
            assert tuple(recipe["sampling"]["stop"]) == STOP
