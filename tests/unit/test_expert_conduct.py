"""What the scripted experts reward, and how they play on from others' faults."""

from __future__ import annotations

from typing import Any

import pieces
import pytest

piece = pieces.piece


# --- rewards ---


PROBLEM = {
    "question": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum of xs."""\n',
    "answer": "    return sum(xs)\n",
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
CODED = [
    ("    return sum(xs)\n", 1.0),
    ("```python\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```", 1.0),
    ("Here:\n```\n    return sum(xs)\n```\nDone.", 1.0),
    ("    return 3\n", 0.0),
    ("    while True: pass\n", 0.0),
    ("    return [0] * 10**11\n", 0.0),
    ("", 0.0),
]


@pytest.mark.slow
def test_code_is_right_if_its_test_passes_and_numbers_if_they_are_equal(piece: Any) -> None:
    rewards = piece("rewards")
    gold = rewards.gold_of(PROBLEM)
    said = [answer for answer, _ in CODED]
    assert rewards.right(said, [gold] * len(said)) == [value for _, value in CODED]
    row = {"question": "?", "answer": "so #### 1,200"}
    assert rewards.right(["#### 1200.0", "1200", "#### 12"], [rewards.gold_of(row)] * 3) == [1.0, 0.0, 0.0]
    assert rewards.kind_of({"question": "?", "answer": "Write a poem."}) is None


# --- experts ---


def test_the_household_expert_goes_on_from_others_faults(piece: Any) -> None:
    module = piece("household")
    expert = module.Expert({"cd": {"drawer": 3}, "keychain": {"desk": 2}})
    goal = {"question": "put some keychain on armchair."}
    first = (
        "You see a armchair 1, a desk 1, a drawer 1, and a shelf 1.\nYour task is to: put some keychain on armchair."
    )
    turns = [
        ("go to armchair 1", "On the armchair 1, you see a cd 2."),
        ("take cd 2 from armchair 1", "You pick up the cd 2 from the armchair 1."),
        ("take keychain 1 from desk 1", "Nothing happens."),  # twice from afar: that says nothing of it
        ("take keychain 1 from desk 1", "Nothing happens."),
        ("go to desk 1", "On the desk 1, you see a keychain 1."),
    ]
    answers = {
        "go to armchair 1": "On the armchair 1, you see nothing.",
        "move cd 2 to armchair 1": "Nothing happens.",  # it lay there, and can't be put there
        "go to drawer 1": "The drawer 1 is closed.",
        "open drawer 1": "You open the drawer 1. In it, you see nothing.",
        "move cd 2 to drawer 1": "You move the cd 2 to the drawer 1.",
        "go to desk 1": "On the desk 1, you see a keychain 1.",
        "take keychain 1 from desk 1": "You pick up the keychain 1 from the desk 1.",
        "move keychain 1 to armchair 1": "You move the keychain 1 to the armchair 1.",
    }
    done = []
    while not done or done[-1] != "move keychain 1 to armchair 1":
        done.append(expert.act(goal, first, turns))
        turns.append((done[-1], answers[done[-1]]))
    assert done == [
        "go to armchair 1", "move cd 2 to armchair 1", "go to drawer 1", "open drawer 1", "move cd 2 to drawer 1",
        "go to desk 1", "take keychain 1 from desk 1", "go to armchair 1", "move keychain 1 to armchair 1",
    ]  # fmt: skip


def test_the_searcher_answers_only_what_was_found(piece: Any) -> None:
    searcher = piece("shopping").Searcher(6, True)
    goal = {"question": "Where was the founder of Brell Mills born?", "answer": "Orlen"}
    first = searcher.act(goal, "", [])
    assert first == "I need to look this up.\nAction: search[Where was the founder of Brell Mills born?]"
    second = searcher.act(goal, "", [(first, "[1] Brell Mills: founded by Mara Veld.")])
    assert second.endswith("Action: search[Brell Mills]")
    turns = [(first, "Brell Mills: founded by Mara Veld."), (second, "Mara Veld: born in Orlen.")]
    assert searcher.act(goal, "", turns) == "The results give the answer.\nAction: answer[Orlen]"
    assert searcher.act(goal, "", [(f"search[{n}]", "nothing") for n in range(5)]) is None
