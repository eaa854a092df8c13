"""What a recipe asks: the prompt's text, its examples, the chat template, and questions that hold braces."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import pytest

from autorl_hpc.files.layout import Root
from autorl_hpc.grading.evaluate import prompt_tokens
from autorl_hpc.records.task import Recipe, Sampling
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.heldout import load_items, load_shots
from autorl_hpc.tasks.loader import load_task


class Characters:
    """An engine whose tokens are characters and whose template names the roles: it shows what was asked."""

    def __init__(self, template: bool) -> None:
        self.template = template

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        if not self.template:
            return None
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


def asked(recipe: Recipe, question: str, *, template: bool, shots: Sequence[dict[str, str]] = ()) -> str:
    tokens = prompt_tokens(Characters(template), recipe, shots, question)  # type: ignore[arg-type]
    return "".join(map(chr, tokens))


def recipe(**fields: object) -> Recipe:
    values = {"name": "r", "version": 1, "prompt": "Q: {question}\nA:", "scorer": "gsm8k", "scorer_version": "1"}
    return Recipe(**{**values, "sampling": Sampling(max_new_tokens=8), **fields})  # type: ignore[arg-type]


def test_the_template_is_used_only_where_the_recipe_and_the_model_have_it() -> None:
    chat = recipe(chat="auto", system="Be brief.")
    assert asked(chat, "x", template=True) == "<system>Be brief.<user>Q: x\nA:<assistant>"
    assert asked(chat, "x", template=False) == "Be brief.\n\nQ: x\nA:"
    assert asked(recipe(system="Be brief."), "x", template=True) == "Be brief.\n\nQ: x\nA:"


def test_each_field_of_a_recipe_changes_its_hash() -> None:
    changes: list[dict[str, object]] = [
        {"prompt": "{question}"},
        {"chat": "auto"},
        {"system": "s"},
        {"sampling": Sampling(max_new_tokens=9)},
        {"sampling": Sampling(max_new_tokens=8, temperature=0.5)},
        {"dtype": "bfloat16"},
        {"scorer_version": "2"},
        {"version": 2},
    ]
    assert len({recipe().hash(), *(recipe(**change).hash() for change in changes)}) == len(changes) + 1


def test_the_four_shot_conversation_of_the_reference(data: Path, tmp_path: Path) -> None:
    task = load_task("gsm8k")
    stage_task(Root(tmp_path), task, data / "gsm8k")
    four_shot = task.recipe("opencompass-4shot")
    shots = load_shots(Root(tmp_path), "gsm8k", four_shot)
    assert [m["role"] for m in shots] == ["user", "assistant"] * 4
    item = load_items(Root(tmp_path), "gsm8k", "report", task.file.splits["report"])[0]
    text = asked(four_shot, item.question, template=True, shots=shots)
    assert text.endswith(f"<user>Question: {item.question}\nLet's think step by step\nAnswer:<assistant>")
    answers = [part.split("<user>")[0] for part in text.split("<assistant>")[1:-1]]
    assert [answer.strip().rsplit(" ", 1)[-1].rstrip(".") for answer in answers] == ["4", "201", "140", "146"]
    assert text.count("{question}") == 0
    assert four_shot.sampling.max_new_tokens == 512 and four_shot.sampling.temperature == 0


@pytest.mark.parametrize("question", ["How many?", "{question}", "{x} {0} %s {{}}", "a\u2028b"])
def test_a_question_stands_as_it_is(question: str) -> None:
    assert asked(recipe(), question, template=True) == f"Q: {question}\nA:"


def test_the_usual_date_changes_no_hash_and_another_one_does() -> None:
    """Runs launched before recipes had a date keep their run ids; a recipe of another date asks another thing."""
    recipe = load_task("arithmetic").file.recipes[0]
    assert "date" not in recipe.model_dump(mode="json") and b"date" not in recipe.canonical()
    other = Recipe.model_validate(recipe.model_dump(mode="json") | {"date": "2025-12-24"})
    assert other.date == datetime.date(2025, 12, 24) and other.hash() != recipe.hash()
