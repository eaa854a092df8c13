"""HumanEval's scorer: code out of awkward answers, pass@k, and oracle and null on the task that the package makes."""

from __future__ import annotations

import itertools
import time

import pytest

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root
from autorl_hpc.sandbox import seccomp
from autorl_hpc.scoring.humaneval import completion, opencompass_completion, pass_at_k
from autorl_hpc.scoring.outcome import Context, Outcome
from autorl_hpc.scoring.registry import scorer
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.heldout import Item, load_items
from autorl_hpc.tasks.loader import load_task

PROMPT = (
    'from typing import List\n\n\ndef add(a: int, b: int) -> int:\n    """Sum.\n    >>> add(2, 3)\n    5\n    """\n'
)
DEF = "def add(a, b):\n    return a + b\n"
LOOP = "    for x in [b]:\n        a += x\n    return a\n"

RIGHT = {
    "a body": "    return a + b",
    "a body with a newline before it": "\n    return a + b\n",
    "a body that lost its first indent": "return a + b",
    "an assignment to an item at the margin": "x = [0, 0]\nx[1 - 1], x[1] = a, b\nreturn sum(x)",
    "a lost first indent of such an assignment": "x = [a, b]\n    x[0] += x[ 1 ]\n    return x[0]",
    "several lines": LOOP,
    "several lines, the first without its indent": LOOP.lstrip(),
    "a block whose first line lost its indent": "if a:\n        return a + b\n    return b",
    "a one-block body at the margin": "if True:\n    return a + b",
    "a body at the margin": "total = a\ntotal += b\nreturn total",
    "two spaces": "  for x in [b]:\n    a += x\n  return a",
    "eight spaces": "        for x in [b]:\n            a += x\n        return a",
    "tabs": "\tfor x in [b]:\n\t\ta += x\n\treturn a",
    "a lost first indent and brackets": "return sum([\n        a,\n        b,\n    ])",
    "Windows lines": "    c = a + b\r\n    return c\r\n",
    "a comment first": "    # add them\n    return a + b",
    "a docstring first": '    """Sum."""\n    return a + b',
    "a body and a helper behind it": "    return helper(a) + b\n\ndef helper(x):\n    return x",
    "a body and prose": "    return a + b\n\nThis adds the two numbers.",
    "prose and a body": "Here is the body:\n\n    return a + b",
    "a whole function": DEF,
    "a whole function with its prompt": PROMPT + "    return a + b\n",
    "a whole function with imports and helpers": "import math\n\nONE = 1\n\ndef helper(x):\n    return x * ONE\n\n"
    + DEF,
    "a future import": "from __future__ import annotations\n" + DEF,
    "a lambda": "add = lambda a, b: a + b",
    "an inner function": "    def inner(x):\n        return x + b\n    return inner(a)",
    "an inner function of the same name": "    def add(x, y):\n        return x + y\n    return add(a, b)",
    "a decorator": "import functools\n@functools.lru_cache\n" + DEF,
    "a fence": f"```python\n{DEF}```",
    "a fence around a body": "```python\n    return a + b\n```",
    "a fence around a body without its indent": "```python\nreturn a + b\n```",
    "a fence without a language": f"```\n{DEF}```",
    "a fence with a space": f"``` python \n{DEF}```",
    "four backticks": f"````python\n{DEF}````",
    "def on the line of the fence": f"```{DEF}```",
    "a language and def on the line of the fence": f"```python {DEF}```",
    "a one-line fence": "```python def add(a, b): return a + b```",
    "return on the line of the fence": "```return a + b```",
    "text around the fence": f"Sure! Here it is:\n\n```python\n{DEF}```\n\nIt adds. Note that:\n- it is short",
    "a fence that is cut off": f"Here:\n```python\n{DEF}",
    "a lone closing fence": "    return a + b\n```\nThis adds them.",
    "a lone closing fence behind a function": f"{DEF}```\nThis adds them.",
    "a lone fence at the end": "    return a + b\n```",
    "a closing fence on the last line": "```python\ndef add(a, b):\n    return a + b```",
    "a shell block before it": f"```bash\npip install x\n```\nthen\n```python\n{DEF}```",
    "an example behind it": f"```python\n{DEF}```\n```python\nprint(add(1, 2))\n```",
    "an empty block before it": f"```\n```\n```python\n{DEF}```",
    "an indented block": "1. So:\n\n    ```python\n    def add(a, b):\n        return a + b\n    ```",
    "prose around a function": f"Here is the function.\n\n{DEF}\nThis works for all numbers. If not, tell me.",
    "a docstring at the margin": 'def add(a, b):\n    """\nSum of the two.\nThis is it.\n"""\n    return a + b\n',
    "thinking": f"<think>\n```python\ndef add(a, b): return 0\n```\n</think>\n{DEF}",
    "thinking that was opened in the prompt": f"def add: hmm\n</think>\n{DEF}",
    "a main": DEF + "\nif __name__ == '__main__':\n    print(add(1, 2))",
    "a use that fails to print": f"```python\n{DEF}print(add(1, 2))\n```",
    "a test of its own": f"{DEF}\nassert add(1, 2) == 3",
    "a signature of several lines": "def add(\n    a,\n    b,\n):\n    return a + b\n",
    "a head first": f"```python\ndef add(a, b):\n```\nThen:\n```python\n{DEF}```",
    "a head first, then a body": "```python\ndef add(a, b):\n```\nThen:\n```python\n    return a + b\n```",
    "the prompt again first": f"```python\n{PROMPT}```\nSolution:\n```python\n{DEF}```",
    "the prompt with a comment first": f"```python\n{PROMPT}    # TODO\n```\nSolution:\n```python\n{DEF}```",
    **{
        f"the fence's info string {info}": f"```{info}\n{DEF}```"
        for info in (
            *(
                "{.python}", '{.python .numberLines startFrom="1"}', "{python, echo=FALSE}", "{code-cell} ipython3",
                "py3", "python3.11",
            ),
            *(
                "Python 3", "python {1,3-4}", "python showLineNumbers", 'python filename="a b.py"',
                "python:line-numbers {1,3}", "python-repl",
            ),
            *("python copy", "python (solution)", "python, ignore", "Solution in Python", "solution.py:1-3"),
        )
    },
    "a comment as a block first": f"```python\n# your code here\n```\n```python\n{DEF}```",
    "pass as a block first": f"```python\npass\n```\n```python\n{DEF}```",
    "an ellipsis as a block first": "```python\n...\n```\n```python\n    return a + b\n```",
    "a refusal as a block first": f"```python\nraise NotImplementedError('x')\n```\n```python\n{DEF}```",
    "a language in a line of its own": f"```\npython\n{DEF}```",
    "an import as a block first": f"```python\nimport math\n```\n```python\n{DEF}```",
    "a class and a stub first": f"```python\nclass A:\n    pass\n\ndef add(a, b):\n    ...\n```\n```python\n{DEF}```",
    "a body and a long cut-off text": '    return a + b\n\ntext = """' + "The function\n" * 200,
    "a function and long prose in a fence": f"```python\n{DEF}\n" + "This adds the two numbers.\n" * 200,
    "a function and a long cut-off list": f"```python\n{DEF}\nTESTS = [\n" + "    (1, 2, 3),\n" * 100,
    "a function and more than is parsed": f"```python\n{DEF}\n" + "assert add(1, 2) == 3\n" * 1000 + "assert add(",
    "a fence in a fence": f"````markdown\n```python\n{DEF}```\n````",
    "tildes": f"~~~python\n{DEF}~~~",
    "a body and a cut-off call": "    return a + b\n\nprint(add(1, ",
    "a body and a cut-off string": '    return a + b\n\ntext = """The fun',
    "a function and a cut-off test in a fence": f"```python\n{DEF}\n\ndef test():\n    assert add(1,",
    "a function and a cut-off try": f"{DEF}\ntry:\n    print(add(1, 2))\nexc",
    **{
        f"a function and the cut-off end {end}": f"{DEF}\n{end}"
        for end in (
            *("Thi", "prin", "print.fo", "assert ad", "import uni", "from math impo", "def che", "class", "if __na"),
            *("@functo", "return", "for", "continue", "# Te", "'notes'", "add", "yield"),
        )
    },
    **{
        f"a cut-off fence that ends with {end}": f"```python\n{DEF}\n{end}"
        for end in ("prin", "x", "assert ad", "import uni", "continue")
    },
    "an import at the end that is used": "def add(a, b):\n    return math.trunc(a + b)\n\nimport math",
    "another name at the end": "def plus(a, b):\n    return a + b\n\nadd = plus",
    **{
        f"the stub {stub} first": f"```python\ndef add(a, b):\n    {stub}\n```\n```python\n{DEF}```"
        for stub in (
            *("...", "return None  # TODO", "return 0  # TODO", "return ...", "return NotImplemented", "assert False"),
            *('"""Sum."""', "raise Exception('not implemented')", "result = None\n    return result", "print('TODO')"),
            *("return []  # placeholder", "# TODO\n    return ''", "del a, b", "raise NotImplementedError('later')"),
        )
    },
    "a stub of a body first": "```python\n    return 0  # TODO\n```\n```python\n    return a + b\n```",
    "a stub behind it": f"```python\n{DEF}```\n```python\ndef add(a, b):\n    return None\n```",
    "a helper in a block before it": f"```python\ndef zero():\n    return 0\n```\n```python\n{DEF}```",
    "no-break spaces for an indent": "\xa0\xa0\xa0\xa0return a + b",
    "a byte order mark": f"\ufeff{DEF}",
    "annotations from the prompt's imports": "def add(a: List[int], b) -> int:\n    return a + b",
}  # fmt: skip


def solved(answers: list[str], name: str = "humaneval", version: str = "5") -> list[bool]:
    test = "def check(candidate):\n    assert candidate(17, 25) == 42\n    assert candidate(0, 0) == 0\n"  # fmt: skip
    item = Item("add", PROMPT, "    return a + b\n", {"test": test, "entry_point": "add"})
    outcomes = scorer(name, version).score([item] * len(answers), [[text] for text in answers], Context())
    return [outcome.value == 1.0 for outcome in outcomes]


def test_code_is_found_in_awkward_answers() -> None:
    found = dict(zip(RIGHT, solved(list(RIGHT.values())), strict=True))
    assert not {name: completion(RIGHT[name], "add") for name, right in found.items() if not right}


@pytest.mark.parametrize(
    "text",
    ["```" * 100_000, "def add" * 50_000, " " * 500_000, "a," * 200_000, "x = " * 200_000, "\n" * 500_000, "<think>" * 50_000,
     '"""' * 100_000, "a[" * 200_000 + "=", "    \n\t" * 80_000, "(((" * 100_000, "return\n" * 50_000],
    ids=range(12),
)  # fmt: skip
def test_no_answer_takes_long(text: str) -> None:
    began = time.process_time()
    completion(text, "add")
    opencompass_completion(text)
    assert time.process_time() - began < 20.0


OPENCOMPASS = [
    ("    return a + b\n", "return a + b"),  # the lost indent
    (LOOP, LOOP.strip()), (f"```python\n{DEF}```", DEF), (f"Sure:\n```\n{DEF}```\nand\n```python\nx\n```", DEF),
    (f"```python\n{DEF}", f"```python\n{DEF}".strip()),  # an unclosed fence stays
    (f"``` python\n{DEF}```", f"``` python\n{DEF}```"),  # so does one with a space
    ("```def add(a, b):\n    return a + b\n```", "```def add(a, b):\n    return a + b\n```"),
    (f"<think>x</think>{DEF}", DEF.strip()), (f"x</think>{DEF}", DEF.strip()), ("", ""),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "expected"), OPENCOMPASS)
def test_the_reference_s_extraction_with_its_faults(answer: str, expected: str) -> None:
    assert opencompass_completion(answer) == expected


# --- pass@k ---


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int) -> None:
    for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
        assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_metrics_are_averages_over_problems() -> None:
    made = scorer("humaneval", "5")
    outcomes = [Outcome(p / 20, {"samples": 20, "passed": p}) for p in (0, 2, 20)]
    metrics = made.metrics([], outcomes)
    assert metrics["pass@1"] == pytest.approx(100 * (0 + 0.1 + 1) / 3)
    assert metrics["pass@10"] == pytest.approx(100 * (0 + pass_at_k(20, 2, 10) + 1) / 3)
    assert set(made.metrics([], [Outcome(1.0, {"samples": 1, "passed": 1})])) == {"pass@1"}
    assert made.metrics([], []) == {}


# --- the task that the package makes ---


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> list[Item]:
    task = load_task("humaneval-mini")
    root = Root(tmp_path_factory.mktemp("mini"))
    stage_task(root, task, None)
    return [item for split, pin in task.file.splits.items() for item in load_items(root, task.name, split, pin)]


def test_of_several_samples_the_share_counts(mini: list[Item]) -> None:
    made = scorer("humaneval", "5")
    answers = [[item.answer, "", item.answer, "    return (", item.answer] for item in mini]
    outcomes = made.score(mini, answers, Context())
    assert {o.value for o in outcomes} == {0.6}
    assert {(o.facts["samples"], o.facts["passed"]) for o in outcomes} == {(5, 3)}
    assert {type(fact) for o in outcomes for fact in o.facts.values()} <= {int, str}
    assert made.metrics(mini, outcomes) == {"pass@1": pytest.approx(60.0)}


# --- the filter of system calls, for the architecture that is not here too ---


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
@pytest.mark.parametrize("may_write", [False, True])
def test_the_filter_jumps_nowhere_and_lists_no_call_twice(machine: str, may_write: bool) -> None:
    steps = seccomp.instructions(machine, may_write=may_write)
    for at, (code, yes, no, _) in enumerate(steps):
        assert code == seccomp.RETURN or at + 1 + max(yes, no) < len(steps)
        assert max(yes, no) < 256
    numbers = [
        int(row.split()[1 + seccomp.ARCHITECTURES[machine][1]].replace("-", "-1")) for row in seccomp.ALWAYS.split(",")
    ]
    known = [number for number in numbers if number >= 0]
    assert len(set(known)) == len(known) and len(known) > 60
    assert len(steps) < 4096 and steps[-1] == seccomp.REFUSE


def simulate(steps: list[tuple[int, int, int, int]], data: bytes) -> tuple[int, int, int, int]:
    """What the kernel would return for a `struct seccomp_data`."""
    loaded, at = 0, 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        if code == seccomp.RETURN:
            return steps[at - 1]
        if code == seccomp.LOAD:
            loaded = int.from_bytes(data[value : value + 4], "little")
            continue
        holds = {
            seccomp.EQUAL: loaded == value,
            seccomp.AT_LEAST: loaded >= value,
            seccomp.ANY_BIT: bool(loaded & value),
        }
        at += yes if holds[code] else no


def returned(
    machine: str, number: int, *arguments: int, may_write: bool = True, audit: int | None = None
) -> tuple[int, int, int, int]:
    words = [number, seccomp.ARCHITECTURES[machine][0] if audit is None else audit]
    data = b"".join(word.to_bytes(4, "little") for word in words) + bytes(8)
    data += b"".join((arguments[n] if n < len(arguments) else 0).to_bytes(8, "little") for n in range(6))
    return simulate(seccomp.instructions(machine, may_write=may_write), data)


@pytest.mark.parametrize(
    ("machine", "reads", "clones", "kills", "opens", "limits"),
    [("x86_64", 0, 56, 62, 257, 302), ("aarch64", 63, 220, 129, 56, 261)],
)
def test_what_the_filter_lets_through(
    machine: str, reads: int, clones: int, kills: int, opens: int, limits: int
) -> None:
    allow, refuse = seccomp.ALLOW, seccomp.REFUSE
    assert returned(machine, reads) == allow
    assert returned(machine, clones) == returned(machine, kills, 1, 9) == refuse
    assert returned(machine, opens, 0, 0, 0) == returned(machine, opens, 0, 0, 0, may_write=False) == allow
    for writing in (1, 2, 0o100, 0o1000, 0o101):
        assert returned(machine, opens, 0, 0, writing) == allow
        assert returned(machine, opens, 0, 0, writing, may_write=False) == refuse
    assert returned(machine, limits, 0, 7) == allow and returned(machine, limits, 4711, 7) == refuse
    assert returned(machine, reads, audit=0x40000003) == seccomp.KILL, "calls of the 32-bit kind"
    assert returned(machine, reads | seccomp.X32_BIT) == seccomp.KILL


def test_an_item_without_a_test_is_the_task_s_fault() -> None:
    with pytest.raises(AutorlError, match="item x has no test and entry point"):
        scorer("humaneval", "5").score([Item("x", PROMPT, "")], [["    return 1"]], Context())
