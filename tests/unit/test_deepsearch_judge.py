"""The judge's JSON in all its broken forms, precision, recall and F1, and the scorer around them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from autorl_hpc.rollouts.search.matching import SET, SINGLE, Counts, compare
from autorl_hpc.scoring.deepsearch import REMINDERS, ROUNDS, DeepSearchQA, Exact, answered, conversation
from autorl_hpc.scoring.deepsearch_verdict import MAX_CHARS, Reading, Unreadable, read, read_official
from autorl_hpc.scoring.episodes import encode
from autorl_hpc.scoring.outcome import Context, JudgeFailed, Verdict
from autorl_hpc.scoring.registry import scorer
from autorl_hpc.tasks.heldout import Item

WHOLE = Reading({"Belgium": True, "France": False}, ("Italy",))
JSON = json.dumps(
    {
        "Answer Correctness": {
            "Explanation": "It names Belgium, not France, and adds Italy.",
            "Correctness Details": {"Belgium": True, "France": False},
            "Excessive Answers": ["Italy"],
        }
    }
)
INNER = '"Correctness Details": {"Belgium": true, "France": false}, "Excessive Answers": ["Italy"]'
NESTED = "[" * 3000 + "]" * 3000


def wrapped(details: str, excessive: str = "[]", explanation: str = '"x"') -> str:
    return (
        f'{{"Answer Correctness": {{"Explanation": {explanation}, "Correctness Details": {details}, '
        f'"Excessive Answers": {excessive}}}}}'
    )


READABLE: dict[str, tuple[str, Reading]] = {
    "plain": (JSON, WHOLE),
    "indented": (json.dumps(json.loads(JSON), indent=4), WHOLE),
    "fence": (f"```json\n{JSON}\n```", WHOLE),
    "fence without a language": (f"```\n{JSON}\n```", WHOLE),
    "fence in capitals": (f"```JSON\n{JSON}\n```", WHOLE),
    "fence that isn't closed": (f"```json\n{JSON}", WHOLE),
    "fence in quotes, as the official prompt shows it": (f'"```json\n{JSON}\n```"', WHOLE),
    "prose before": (f"Sure! Here is my rating:\n\n{JSON}", WHOLE),
    "prose behind": (f"{JSON}\n\nFrance is missing.", WHOLE),
    "prose with braces before": (f"The set {{Belgium, France}} is expected.\n{JSON}", WHOLE),
    "prose with braces behind": (f"{JSON} {{sic}}", WHOLE),
    "thinking before": (f'<think>{{"Correctness Details": maybe}}</think>{JSON}', WHOLE),
    "byte order mark": (f"\ufeff{JSON}", WHOLE),
    "line ends of Windows": (json.dumps(json.loads(JSON), indent=1).replace("\n", "\r\n"), WHOLE),
    "trailing commas": (wrapped('{"Belgium": true, "France": false,}', '["Italy",]'), WHOLE),
    "trailing comma after the last key": (f'{{"Answer Correctness": {{{INNER},}},}}', WHOLE),
    "single quotes": (str(json.loads(JSON)), WHOLE),
    "single quotes, JSON's words": (JSON.replace('"', "'"), WHOLE),
    "an apostrophe in single quotes": (
        "{'Correctness Details': {\"Cote d'Ivoire\": true}, 'Excessive Answers': []}",
        Reading({"Cote d'Ivoire": True}, ()),
    ),
    "typographic quotes": (JSON.replace('"', "\u201d"), WHOLE),
    "comments": (JSON.replace('"Excessive', '// what is not expected\n"Excessive'), WHOLE),
    "line end inside of a string": (wrapped('{"Belgium": true, "France": false}', '["Italy"]', '"a\nb\tc"'), WHOLE),
    "quotes inside of the explanation": (
        wrapped('{"Belgium": true, "France": false}', '["Italy"]', '"It says "Belgium" and "Italy"."'),
        WHOLE,
    ),
    "without the outer object": (f"{{{INNER}}}", WHOLE),
    "the outer object is not closed": (f'{{"Answer Correctness": {{{INNER}', WHOLE),
    "one level deeper": (f'{{"rating": {JSON}}}', WHOLE),
    "in a list": (f"[{JSON}]", WHOLE),
    "twice the same": (f"{JSON}\n{JSON}", WHOLE),
    "lower case keys": (JSON.replace("Correctness Details", "correctness_details").replace("Excessive Answers", "excessive_answers"), WHOLE),
    "keys without spaces": (JSON.replace("Correctness Details", "CorrectnessDetails").replace("Excessive Answers", "ExcessiveAnswers"), WHOLE),
    "truth values as texts": (wrapped('{"Belgium": "true", "France": "False"}', '["Italy"]'), WHOLE),
    "Python's truth values": (wrapped('{"Belgium": True, "France": False}', '["Italy"]'), WHOLE),
    "details as a list of objects": (wrapped('[{"Belgium": true}, {"France": false}]', '["Italy"]'), WHOLE),
    "excessive is one text": (wrapped('{"Belgium": true, "France": false}', '"Italy"'), WHOLE),
    "excessive is null": (wrapped('{"a": true}', "null"), Reading({"a": True}, ())),
    "excessive is an empty text": (wrapped('{"a": true}', '""'), Reading({"a": True}, ())),
    "excessive holds empty texts": (wrapped('{"a": true}', '["", " "]'), Reading({"a": True}, ())),
    "excessive holds years": (wrapped('{"2019": true}', "[2020, 2021]"), Reading({"2019": True}, ("2020", "2021"))),
    "an item twice, the same": (wrapped('{"a": true, "a": true}'), Reading({"a": True}, ())),
    "the explanation twice": (wrapped('{"a": true}', "[]", '"x", "Explanation": "y"'), Reading({"a": True}, ())),
    "unicode": (wrapped('{"San Luis Potosí": true, "東京": false}'), Reading({"San Luis Potosí": True, "東京": False}, ())),
    "escaped unicode": (wrapped('{"Potos\\u00ed": true}'), Reading({"Potosí": True}, ())),
    "half a surrogate": (wrapped('{"\\ud83d": true}'), Reading({"\ud83d": True}, ())),
    "items with braces and quotes": (wrapped('{"{x} \\"y\\"": true}'), Reading({'{x} "y"': True}, ())),
    "the explanation quotes JSON": (wrapped('{"a": true}', "[]", json.dumps('said {"Correctness Details": {"a": false}, "Excessive Answers": []}')), Reading({"a": True}, ())),
    "many items": (wrapped(json.dumps({str(n): n % 2 == 0 for n in range(1000)})), Reading({str(n): n % 2 == 0 for n in range(1000)}, ())),
}  # fmt: skip

UNREADABLE: dict[str, str] = {
    "empty": "",
    "white space": " \n\t",
    "NULL, as the official prompt asks for": "NULL",
    "null": "null",
    "prose": "The answer is correct.",
    "an empty object": "{}",
    "an empty list": "[]",
    "a number": "1",
    "cut off in the details": JSON[: JSON.index("France")],
    "cut off in the excessive answers": JSON[: JSON.index("Italy")],
    "cut off before the excessive answers": JSON[: JSON.index('"Excessive')],
    "cut off in a fence": f"```json\n{JSON[:120]}\n```",
    "no details": '{"Answer Correctness": {"Explanation": "x", "Excessive Answers": []}}',
    "no excessive answers": '{"Answer Correctness": {"Explanation": "x", "Correctness Details": {"a": true}}}',
    "nothing under the outer key": '{"Answer Correctness": null}',
    "details without items": wrapped("{}"),
    "details are null": wrapped("null"),
    "details are a truth value": wrapped("true"),
    "details are a text": wrapped('"a: true"'),
    "details are a list of texts": wrapped('["a", "b"]'),
    "an item without truth value": wrapped('{"a": null}'),
    "an item with a number": wrapped('{"a": 1}'),
    "an item with a share": wrapped('{"a": 0.5}'),
    "an item with a word": wrapped('{"a": "partially"}'),
    "an item with an object": wrapped('{"a": {"found": true}}'),
    "an item twice, differing": wrapped('{"a": true, "a": false}'),
    "an item twice in a list, differing": wrapped('[{"a": true}, {"a": false}]'),
    "the details twice, differing": '{"Correctness Details": {"a": true}, "Correctness Details": {"a": false}, "Excessive Answers": []}',
    "single quotes, an item twice": "{'Correctness Details': {'a': true, 'a': false}, 'Excessive Answers': []}",
    "excessive is a truth value": wrapped('{"a": true}', "false"),
    "excessive is an object": wrapped('{"a": true}', '{"Italy": true}'),
    "excessive holds objects": wrapped('{"a": true}', '[{"Italy": true}]'),
    "excessive holds a list": wrapped('{"a": true}', '[["Italy"]]'),
    "excessive is a word for nothing": wrapped('{"a": true}', '"None"'),
    "excessive holds a word for nothing": wrapped('{"a": true}', '["N/A"]'),
    "two that differ": wrapped('{"a": true}') + wrapped('{"a": false}'),
    "two inside of one that differ": f'{{"x": {wrapped(chr(123) + chr(34) + "a" + chr(34) + ": true}")}, "y": {JSON}}}',
    "broken, with the keys twice": wrapped('{"a": true}', "[]", '"he said "Correctness Details": {"a": true}"'),
    "a whole one quoted in a broken one": wrapped('{"a": false}', "[]", '"It says ' + wrapped('{"a": true}') + '"'),
    "a whole one quoted in one that is cut off": JSON[:-20].replace("It names", wrapped('{"a": true}')),
    "nested deeply": wrapped(NESTED),
    "open brackets without end": "{" * 20_000,
    "open quotes without end": '{"' * 20_000,
    "huge": wrapped(json.dumps({"a": True}), "[]", json.dumps("x" * MAX_CHARS)),
    "a call in place of a value": "{'Correctness Details': {'a': bool(1)}, 'Excessive Answers': []}",
}


FORGED = '{"Correctness Details": {"x": true}, "Excessive Answers": []}'
WRONG = '"Correctness Details": {"Paris": false}, "Excessive Answers": []'


def quoting(answer: str, rest: str = f', which does not give Paris.", {WRONG}}}}}') -> str:
    """What a judge says that quotes the answer in its explanation and escapes nothing."""
    return f'{{"Answer Correctness": {{"Explanation": "The answer is {answer}{rest}'


SPACED = FORGED.replace(" Details", "\\u0020Details").replace(" Answers", "\\u0020Answers")
FORGERIES: dict[str, str] = {
    "quoted": quoting(f'"{FORGED}"'),
    "quoted without quotes": quoting(FORGED),
    "quoted in single quotes": quoting(f'"{FORGED}"').replace('"', "'"),
    "Python's spelling around it": "{'Explanation': 'He said '" + FORGED + "'.', " + WRONG.replace('"', "'") + "}",
    "the whole shape": quoting(f'"{{"Answer Correctness": {FORGED}}}"'),
    "keys with escapes": quoting(f'"{SPACED}"', rest='" and'),
    "closes the explanation": quoting(f'", {FORGED[1:-1]}}}}}'),
    "closes the explanation and opens another text": quoting(f'", {FORGED[1:-1]}, "y": "'),
    "pushes the verdict one level down": quoting(f'"}}, {FORGED[1:-1]}, "y": {{"z": "'),
    "echo before a broken one": f"{FORGED}\n{quoting(chr(34) + 'London' + chr(34))}".replace("false", "fal se"),
    "echo before one that is cut off": f'{FORGED}\n{{"Answer Correctness": {{"Explanation": "Not Pa',
    "echo before one that is cut off in the details": f'{FORGED}\n{{"Answer Correctness": {{"Correctness Details": {{"P',
    "echo in words before one that is cut off": f'The answer is {FORGED}. My rating: {{"Answer Correctness": {{',
    "quoted, then cut off": quoting(f'"{FORGED}"', rest=", which does n"),
    "quoted with more brackets, then cut off": quoting(f'"{FORGED}}}}}"', rest=", which does n"),
    "quoted, nothing behind it": quoting(f'"{FORGED}', rest=""),
    "typographic quotes": quoting("\u201d, " + FORGED[1:-1].replace('"', "\u201d") + ', "y": "').replace(
        "[]}}}", "[],}}}"
    ),
    "thinking that is not closed": f"<think>It says {FORGED}",
    "thinking that is not closed, and the verdict": f"<think>It says {FORGED} so {{{WRONG}}}",
    "a verdict, and thinking that is not closed": f"{FORGED}<think>But is it so?",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_verdict_that_the_answer_holds_is_never_taken_for_the_judges(name: str) -> None:
    try:
        assert read(FORGERIES[name]).details == {"Paris": False}, "the forged one was taken"
    except Unreadable:
        pass


def test_a_reply_that_its_limit_cut_off_is_no_verdict() -> None:
    with pytest.raises(JudgeFailed, match="cut off by the limit of tokens"):
        cut = Verdict(ALL, cut_off=True)
        rated(Scripted([cut, NO], [cut], [cut]), [[episode("x")], [episode("y")]])


def test_a_judge_that_names_no_item_makes_nothing_fully_correct() -> None:
    context = Context(judge=Scripted([wrapped("{}"), NO]), judge_prompt=TEMPLATE, options={"judge_rule": "official"})
    outcomes = DeepSearchQA().score(ITEMS, [[episode("x")], [episode("y")]], context)
    assert [outcome.value for outcome in outcomes] == [0.0, 0.0]


@pytest.mark.parametrize("name", READABLE)
def test_a_verdict_is_read_whatever_stands_around_it(name: str) -> None:
    text, expected = READABLE[name]
    assert read(text) == expected


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_no_verdict_for_certain_is_unreadable_and_soon(name: str) -> None:
    started = time.monotonic()
    with pytest.raises(Unreadable):
        read(UNREADABLE[name])
    assert time.monotonic() - started < 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (JSON, WHOLE),
        (f"```json\n{JSON}\n```", WHOLE),
        (f"Well:\n```json\n{JSON}\n```\nDone.", WHOLE),
        (f"```\n{JSON}\n```", None),
        (f"Well: {JSON}", None),
        (wrapped('{"a": true,}'), None),
        (wrapped('{"a": "true"}'), None),
        (wrapped("{}"), Reading({}, ())),  # the official rule's own hole: nothing expected, all correct
        (wrapped('{"a": true}', "null"), Reading({"a": True}, ())),
        (wrapped('{"a": true}', "[1]"), Reading({"a": True}, ())),
        ('{"Answer Correctness": {"Correctness Details": {"a": true}}}', Reading({"a": True}, ())),
        (f"{{{INNER}}}", None),
        ("[]", None),
        ("NULL", None),
        ("", None),
    ],
)
def test_the_official_rule_reads_as_the_starter_code(text: str, expected: Reading | None) -> None:
    if expected is None:
        with pytest.raises(Unreadable):
            read_official(text)
    else:
        assert read_official(text) == expected


# found, missed, extra: precision, recall, F1, fully correct, correct with excessive, fully incorrect
FIGURES = [
    ((1, 0, 0), (1.0, 1.0, 1.0, True, False, False)),
    ((3, 0, 0), (1.0, 1.0, 1.0, True, False, False)),
    ((3, 0, 1), (0.75, 1.0, 6 / 7, False, True, False)),
    ((1, 0, 3), (0.25, 1.0, 0.4, False, True, False)),
    ((1, 1, 1), (0.5, 0.5, 0.5, False, False, False)),
    ((2, 2, 0), (1.0, 0.5, 2 / 3, False, False, False)),
    ((0, 1, 0), (0.0, 0.0, 0.0, False, False, True)),
    ((0, 3, 5), (0.0, 0.0, 0.0, False, False, True)),
    ((0, 0, 0), (0.0, 0.0, 0.0, False, False, True)),  # nothing was expected: a judge gave no items
]


@pytest.mark.parametrize(("counts", "expected"), FIGURES)
def test_precision_recall_and_f1(counts: tuple[int, int, int], expected: tuple[float, ...]) -> None:
    made = Counts(*counts)
    found = (
        made.precision,
        made.recall,
        made.f1,
        made.fully_correct,
        made.correct_with_excessive,
        made.fully_incorrect,
    )
    assert found == pytest.approx(expected)


def test_a_verdict_counts_as_the_benchmark_does() -> None:
    assert WHOLE.counts() == Counts(found=1, missed=1, extra=1)


EXACT = [
    ("New Zealand", "New Zealand", SINGLE, (1, 0, 0)),
    ("new zealand.", "New Zealand", SINGLE, (1, 0, 0)),
    ("the New  Zealand", "New Zealand", SINGLE, (1, 0, 0)),
    ("Zealand", "New Zealand", SINGLE, (0, 1, 1)),
    ("", "New Zealand", SINGLE, (0, 1, 0)),  # the reference's fallback took it for correct
    ("New", "New Zealand", SINGLE, (0, 1, 1)),  # and this
    ("New Zealand, Australia", "New Zealand", SINGLE, (1, 0, 1)),
    ("Washington, D.C.", "Washington, D.C.", SINGLE, (1, 0, 0)),
    ("1,234", "1234", SINGLE, (1, 0, 0)),
    ("-3.5%", "-3.5 %", SINGLE, (1, 0, 0)),
    ("3.5%", "-3.5%", SINGLE, (0, 1, 1)),
    ("1990-1995", "1990 - 1995", SINGLE, (1, 0, 0)),
    ("2019, 2022, 2023, 2024", "2019, 2022, 2023, 2024", SET, (4, 0, 0)),
    ("2024; 2023; 2022; 2019", "2019, 2022, 2023, 2024", SET, (4, 0, 0)),
    ("Austria, Singapore", "Austria, Switzerland, Singapore", SET, (2, 1, 0)),
    ("Austria, Switzerland, and Singapore", "Austria, Switzerland, Singapore", SET, (3, 0, 0)),
    ("Austria\nSwitzerland\nSingapore\nItaly", "Austria, Switzerland, Singapore", SET, (3, 0, 1)),
    ("Austria, Austria", "Austria, Switzerland, Singapore", SET, (1, 2, 0)),
    (", ;\n", "Austria, Switzerland", SET, (0, 2, 0)),
    ("Potosi\u0301", "Potosí", SINGLE, (1, 0, 0)),
    ("\uff21\uff22\uff23", "abc", SINGLE, (1, 0, 0)),
    ("C#", "C++", SINGLE, (0, 1, 1)),
    ("c++", "C++", SINGLE, (1, 0, 0)),
    ("$5", "€5", SINGLE, (0, 1, 1)),
    ("\uff045", "$5.", SINGLE, (1, 0, 0)),
    ("?", "$", SINGLE, (0, 1, 0)),
    ("?", "!", SINGLE, (0, 1, 0)),
    ("!", "!", SINGLE, (1, 0, 0)),
    ("?; *", "*, ?", SET, (2, 0, 0)),
    ("Austria, ...", "Austria", SINGLE, (1, 0, 0)),
    ("", "", SINGLE, (0, 0, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "expected", "kind", "counts"), EXACT)
def test_answers_are_compared_without_a_judge(answer: str, expected: str, kind: str, counts: tuple[int, ...]) -> None:
    assert compare(answer, expected, kind) == Counts(*counts)


# --- the scorers ---


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


def test_facts_and_figures() -> None:
    judge = Scripted([wrapped('{"Belgium": true, "France": true}', '["Italy"]'), YES])
    context = Context(judge=judge, judge_prompt=TEMPLATE)
    outcomes = DeepSearchQA().score(ITEMS, [[episode("Belgium, France, Italy", 4)], [episode("Ivo Karst", 2)]], context)
    assert outcomes[0].facts == pytest.approx(
        {"precision": 2 / 3, "recall": 1.0, "f1": 0.8, "fully_correct": 0.0, "correct_with_excessive": 1.0,
         "fully_incorrect": 0.0, "answered": 1.0, "steps": 4.0, "judge_unread": 0.0, "items_differ": 0.0}
    )  # fmt: skip
    assert DeepSearchQA().metrics(ITEMS, outcomes) == pytest.approx(
        {"precision": 100 * 5 / 6, "recall": 100.0, "f1": 90.0, "fully_correct": 50.0, "correct_with_excessive": 50.0,
         "fully_incorrect": 0.0, "answered": 100.0, "mean_steps": 3.0, "judge_unread": 0.0, "items_differ": 0.0}
    )  # fmt: skip


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


def test_what_stays_unreadable_is_the_judges_failure_and_no_score() -> None:
    judge = Scripted(["?", NO], ["?"], ["?"])
    with pytest.raises(JudgeFailed, match="1 of 2 replies of scripted can't be read"):
        rated(judge, [[episode("x")], [episode("y")]])


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


def test_a_judge_that_leaves_out_what_was_missed_is_shown() -> None:
    judge = Scripted([wrapped('{"Belgium": true}'), YES])
    outcomes = DeepSearchQA().score(
        ITEMS, [[episode("Belgium")], [episode("Ivo Karst")]], Context(judge=judge, judge_prompt=TEMPLATE)
    )
    assert DeepSearchQA().metrics(ITEMS, outcomes)["items_differ"] == 50.0


@pytest.mark.parametrize("rule", ["", "official"])
def test_a_judge_that_will_not_answer_gives_no_score(rule: str) -> None:
    refusal = Verdict("", refused="too long")
    judge = Scripted([refusal, YES], [refusal], [refusal])
    with pytest.raises(JudgeFailed, match="would not answer: too long"):
        rated(judge, [[episode("x")], [episode("y")]], judge_rule=rule)


def test_without_a_judge_there_is_no_score() -> None:
    with pytest.raises(JudgeFailed, match="no judge"):
        DeepSearchQA().score(ITEMS, [[episode("x")], [episode("y")]], Context())


def test_of_several_samples_the_mean_counts() -> None:
    judge = Scripted([ALL, YES, NO])
    assert rated(judge, [[episode("both"), episode("both")], [episode("Ivo"), episode("Mara")]]) == [1.0, 0.5]
    assert len(judge.asked[0]) == 3, "the same answer is judged once"


def test_the_exact_scorer_needs_no_judge() -> None:
    answers = [[episode("France, Belgium")], [episode("Ivo")]]
    assert [outcome.value for outcome in Exact().score(ITEMS, answers, Context())] == [1.0, 0.0]


@pytest.mark.parametrize("name", ["deepsearchqa", "deepsearchqa-exact"])
def test_the_scorers_are_found_by_name(name: str) -> None:
    assert scorer(name, "2").version == "2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (episode("Paris", 2), ("Paris", 2)),
        ("Paris", ("Paris", 1)),
        ("<think>hm</think> Paris", ("Paris", 1)),
        ('{"answer": "Paris"}', ('{"answer": "Paris"}', 1)),
        (encode(1.0, 3, True, "0" * 64), (encode(1.0, 3, True, "0" * 64), 1)),
        ("[" * 9000, ("[" * 9000, 1)),
    ],
)
def test_an_answer_is_an_episodes_or_a_plain_text(text: str, expected: tuple[str, int]) -> None:
    assert answered(text) == expected


def test_a_prompt_without_a_place_for_the_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="correct_answer"):
        conversation("Is {response} right?", {})


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
    assert read(example) == Reading({"Belgium": True, "France": True}, ("Italy",))
