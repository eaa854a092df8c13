"""Makes the splits of `humaneval-mini`: 24 tiny problems of our own in HumanEval's form, eight a split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """One function.

    Attributes:
        head: name and parameters, `add(a, b)`.
        words: the docstring.
        body: the lines of a right body, without their indent.
        cases: calls and what they give, `(2, 3) -> 5`, as Python writes it; the first stands in the docstring.
    """

    head: str
    words: str
    body: str
    cases: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """The entry point."""
        return self.head.split("(")[0]


TRAIN = (
    Problem("add(a, b)", "Sum of a and b.", "return a + b", (("2, 3", "5"), ("-4, 4", "0"), ("70, 7", "77"))),
    Problem("double(n)", "Twice n.", "return 2 * n", (("4", "8"), ("-3", "-6"), ("0", "0"))),
    Problem("last(xs)", "Last item of xs.", "return xs[-1]", (("[1, 2]", "2"), ("['a']", "'a'"), ("[3, 1, 4]", "4"))),
    Problem("is_even(n)", "Is n even?", "return n % 2 == 0", (("4", "True"), ("7", "False"), ("0", "True"))),
    Problem("shout(s)", "s in capitals.", "return s.upper()", (("'hi'", "'HI'"), ("'aB c'", "'AB C'"), ("''", "''"))),
    Problem("total(xs)", "Sum of all xs.", "return sum(xs)", (("[1, 2, 3]", "6"), ("[]", "0"), ("[-5, 5, 9]", "9"))),
    Problem("join(a, b)", "a, a dash, b.", "return a + '-' + b", (("'x', 'y'", "'x-y'"), ("'', 'b'", "'-b'"))),
    Problem(
        "evens(xs)",
        "Even items of xs.",
        "found = []\nfor x in xs:\n    if x % 2 == 0:\n        found.append(x)\nreturn found",
        (("[1, 2, 4]", "[2, 4]"), ("[]", "[]"), ("[7, 9]", "[]"), ("[-2, 3, 0]", "[-2, 0]")),
    ),
)
FEEDBACK = (
    Problem("sub(a, b)", "a less b.", "return a - b", (("5, 3", "2"), ("0, 9", "-9"), ("7, 7", "0"))),
    Problem("square(n)", "n times n.", "return n * n", (("3", "9"), ("-4", "16"), ("0", "0"))),
    Problem("first(xs)", "First item of xs.", "return xs[0]", (("[1, 2]", "1"), ("['b', 'a']", "'b'"), ("[8]", "8"))),
    Problem("is_odd(n)", "Is n odd?", "return n % 2 == 1", (("3", "True"), ("8", "False"), ("-1", "True"))),
    Problem("size(xs)", "How many xs.", "return len(xs)", (("[4, 4]", "2"), ("[]", "0"), ("[1, 2, 3, 4]", "4"))),
    Problem("turn(s)", "s backwards.", "return s[::-1]", (("'abc'", "'cba'"), ("''", "''"), ("'noon!'", "'!noon'"))),
    Problem("larger(a, b)", "The larger one.", "return max(a, b)", (("2, 9", "9"), ("5, -5", "5"), ("3, 3", "3"))),
    Problem(
        "above(xs, n)",
        "Items of xs above n.",
        "return [x for x in xs if x > n]",
        (("[1, 5, 3], 2", "[5, 3]"), ("[], 0", "[]"), ("[2, 2], 2", "[]"), ("[-1, 0], -2", "[-1, 0]")),
    ),
)
REPORT = (
    Problem("mul(a, b)", "a times b.", "return a * b", (("2, 3", "6"), ("-4, 5", "-20"), ("0, 8", "0"))),
    Problem("half(n)", "Half of an even n.", "return n // 2", (("8", "4"), ("0", "0"), ("-6", "-3"))),
    Problem("cube(n)", "n to the power 3.", "return n ** 3", (("2", "8"), ("-3", "-27"), ("1", "1"))),
    Problem("smallest(xs)", "Least of xs.", "return min(xs)", (("[3, 1, 2]", "1"), ("[5]", "5"), ("[0, -7]", "-7"))),
    Problem("quiet(s)", "s in small letters.", "return s.lower()", (("'HI'", "'hi'"), ("'aB'", "'ab'"), ("''", "''"))),
    Problem("swap(a, b)", "b and a, a tuple.", "return b, a", (("1, 2", "(2, 1)"), ("'x', None", "(None, 'x')"))),
    Problem(
        "unique(xs)",
        "Set of the xs.",
        "return set(xs)",
        (("[1, 1, 2]", "{1, 2}"), ("[]", "set()"), ("['a', 'b', 'a']", "{'a', 'b'}")),
    ),
    Problem(
        "count(s)",
        "How often each letter is in s.",
        "found = {}\nfor c in s:\n    found[c] = found.get(c, 0) + 1\nreturn found",
        (("'aab'", "{'a': 2, 'b': 1}"), ("''", "{}"), ("'zz'", "{'z': 2}")),
    ),
)


def row(problem: Problem) -> dict[str, str]:
    """A problem in the fields of HumanEval's training file."""
    arguments, result = problem.cases[0]
    name = problem.name
    prompt = f'def {problem.head}:\n    """{problem.words}\n    >>> {name}({arguments})\n    {result}\n    """\n'
    asserts = "".join(f"    assert candidate({given}) == {wanted}\n" for given, wanted in problem.cases)
    return {
        "task_id": f"mini/{name}",
        "question": prompt,
        "answer": "".join(f"    {line}\n" for line in problem.body.split("\n")),
        "entry_point": name,
        "test": f"def check(candidate):\n{asserts}",
    }


def held_out(problem: Problem) -> dict[str, str]:
    """A problem as a grader gets it."""
    item = row(problem)
    return {"id": item.pop("task_id"), **item}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON lines with sorted keys: the same rows give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each, sort_keys=True) + "\n" for each in rows), encoding="utf-8")


def prepare(source: Path | None, out: Path) -> None:
    """Writes train/train.jsonl, feedback/items.jsonl and report/items.jsonl under `out`; `source` is not used."""
    del source
    write_rows(out / "train" / "train.jsonl", [row(problem) for problem in TRAIN])
    write_rows(out / "feedback" / "items.jsonl", [held_out(problem) for problem in FEEDBACK])
    write_rows(out / "report" / "items.jsonl", [held_out(problem) for problem in REPORT])
