"""The scorers around the judge: what it is asked, what is asked again, and when there is no score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from verdicts import wrapped

from autorl_hpc.rollouts.search.matching import SET, SINGLE
from autorl_hpc.scoring.deepsearchqa import REMINDERS, ROUNDS, DeepSearchQA, ParsedVerdict, answered, conversation, read
from autorl_hpc.scoring.outcome import Context, JudgeFailed, Verdict
from autorl_hpc.scoring.registry import encode
from autorl_hpc.tasks.heldout import Item


def test_a_reply_that_its_limit_cut_off_is_no_verdict() -> None:
    with pytest.raises(JudgeFailed, match="cut off by the limit of tokens"):
        cut = Verdict(ALL, cut_off=True)
        rated(Scripted([cut, NO], [cut], [cut]), [[episode("x")], [episode("y")]])


class Scripted:
    """A judge that replies by a plan, one list of replies a round."""

    model = "scripted"

    def __init__(self, *rounds: Sequence[str | Verdict]) -> None:
        self.rounds = list(rounds)
        self.asked: list[list[str]] = []
        self.forgotten: list[str] = []

    def ask(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], *, max_tokens: int, logprobs: int = 0
    ) -> list[Verdict]:
        self.asked.append([conversation[-1]["content"] for conversation in conversations])
        replies = self.rounds[len(self.asked) - 1]
        return [reply if isinstance(reply, Verdict) else Verdict(reply) for reply in replies]

    def forget(self, verdicts: Sequence[Verdict]) -> None:
        self.forgotten += [verdict.text for verdict in verdicts]


TEMPLATE = "Q {question} T {prompt_type} A {correct_answer} R {response} {{json}}"
ITEMS = [
    Item("a", "Which countries?", "Belgium, France", {"answer_type": SET}),
    Item("b", "Who?", "Ivo Karst", {"answer_type": SINGLE}),
]
ALL = wrapped('{"Belgium": true, "France": true}')
YES, NO = wrapped('{"Ivo Karst": true}'), wrapped('{"Ivo Karst": false}')


def episode(answer: str, steps: int = 3) -> str:
    return encode(0.0, steps, bool(answer), "0" * 64, answer)


def rated(judge: Scripted, answers: Sequence[Sequence[str]], **options: str) -> list[float]:
    context = Context(judge=judge, judge_mode="json", judge_prompt=TEMPLATE, options=options)
    return [outcome.value for outcome in DeepSearchQA().score(ITEMS, answers, context)]


def test_the_judge_sees_question_type_gold_and_the_episodes_answer() -> None:
    judge = Scripted([ALL, NO])
    assert rated(judge, [[episode("Belgium {and} France")], [episode("Mara")]]) == [1.0, 0.0]
    assert judge.asked == [
        [
            "Q Which countries? T Set Answer A Belgium, France R Belgium {and} France {json}",
            "Q Who? T Single Answer A Ivo Karst R Mara {json}",
        ]
    ]


def test_no_answer_is_wrong_and_no_judge_is_asked_about_it() -> None:
    judge = Scripted([YES])
    assert rated(judge, [[episode("")], [episode("Ivo Karst")]]) == [0.0, 1.0]
    assert len(judge.asked[0]) == 1


def test_only_what_could_not_be_read_is_asked_again_in_other_words() -> None:
    judge = Scripted(["no idea", NO], ["NULL"], [ALL])
    assert rated(judge, [[episode("x")], [episode("y")]]) == [1.0, 0.0]
    assert [len(asked) for asked in judge.asked] == [2, 1, 1]
    assert judge.forgotten == ["no idea", "NULL"]
    assert len({asked[0] for asked in judge.asked}) == ROUNDS == len(set(REMINDERS)), "a cache would give the old reply"


def test_one_answer_in_a_hundred_may_confuse_the_judge_for_good_and_gives_nothing() -> None:
    items = [Item(f"i{number}", "Who?", "Ivo Karst", {"answer_type": SINGLE}) for number in range(100)]
    answers = [[episode(f"x{number}")] for number in range(100)]
    context = Context(judge=Scripted(["?", *[YES] * 99], ["?"], ["?"]), judge_prompt=TEMPLATE)
    outcomes = DeepSearchQA().score(items, answers, context)
    assert [outcome.value for outcome in outcomes] == [0.0, *[1.0] * 99]
    assert DeepSearchQA().metrics(items, outcomes)["judge_unread"] == 1.0
    context = Context(judge=Scripted(["?", "?", *[YES] * 98], ["?", "?"], ["?", "?"]), judge_prompt=TEMPLATE)
    with pytest.raises(JudgeFailed, match="2 of 100"):
        DeepSearchQA().score(items, answers, context)


def test_under_the_official_rule_the_unreadable_counts_as_nothing_found_and_is_shown() -> None:
    judge = Scripted([f"Well: {ALL}", YES])
    context = Context(judge=judge, judge_prompt=TEMPLATE, options={"judge_rule": "official"})
    outcomes = DeepSearchQA().score(ITEMS, [[episode("x")], [episode("Ivo Karst")]], context)
    assert [outcome.value for outcome in outcomes] == [0.0, 1.0] and len(judge.asked) == 1
    metrics = DeepSearchQA().metrics(ITEMS, outcomes)
    assert metrics["judge_unread"] == 50.0 and metrics["recall"] == 50.0 and metrics["fully_incorrect"] == 50.0


@pytest.mark.parametrize("rule", ["", "official"])
def test_a_judge_that_will_not_answer_gives_no_score(rule: str) -> None:
    refusal = Verdict("", refused="too long")
    judge = Scripted([refusal, YES], [refusal], [refusal])
    with pytest.raises(JudgeFailed, match="would not answer: too long"):
        rated(judge, [[episode("x")], [episode("y")]], judge_rule=rule)


def test_of_several_samples_the_mean_counts() -> None:
    judge = Scripted([ALL, YES, NO])
    assert rated(judge, [[episode("both"), episode("both")], [episode("Ivo"), episode("Mara")]]) == [1.0, 0.5]
    assert len(judge.asked[0]) == 3, "the same answer is judged once"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (episode("Paris", 2), ("Paris", 2)), ("Paris", ("Paris", 1)), ("<think>hm</think> Paris", ("Paris", 1)),
        ('{"answer": "Paris"}', ('{"answer": "Paris"}', 1)),
        (encode(1.0, 3, True, "0" * 64), (encode(1.0, 3, True, "0" * 64), 1)), ("[" * 9000, ("[" * 9000, 1)),
    ],
)  # fmt: skip
def test_an_answer_is_an_episodes_or_a_plain_text(text: str, expected: tuple[str, int]) -> None:
    assert answered(text) == expected


def test_the_official_prompt_can_be_filled(data: Path) -> None:
    template = (data / "deepsearchqa" / "judge_prompt_official.txt").read_text(encoding="utf-8")
    values = {"question": "Who?", "prompt_type": SINGLE, "correct_answer": "Ivo {x}", "response": "{correct_answer}"}
    (turn,) = conversation(template, values)
    assert (
        "<answer>\nIvo {x}\n</answer>" in turn["content"]
        and "<response>\n{correct_answer}\n</response>" in turn["content"]
    )
    assert '"Answer Correctness": {\n' in turn["content"] and "{{" not in turn["content"]
    example = turn["content"].partition("```json")[2].partition("```")[0]
    assert read(example) == ParsedVerdict({"Belgium": True, "France": True}, ("Italy",))


def test_a_judge_that_names_no_item_makes_nothing_fully_correct() -> None:
    context = Context(judge=Scripted([wrapped("{}"), NO]), judge_prompt=TEMPLATE, options={"judge_rule": "official"})
    outcomes = DeepSearchQA().score(ITEMS, [[episode("x")], [episode("y")]], context)
    assert [outcome.value for outcome in outcomes] == [0.0, 0.0]
