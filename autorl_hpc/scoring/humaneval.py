"""Scorers of HumanEval: extract code from an answer and run each problem's tests (`humaneval`, `humaneval-opencompass`)."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.rollouts.characters import plain_characters
from autorl_hpc.sandbox.programs import Program, ProgramLimits, ProgramVerdict, longest_s, run_programs
from autorl_hpc.scoring.gsm8k import opencompass_text, without_thinking
from autorl_hpc.scoring.outcome import Context, Fact, ItemLike, Outcome
from autorl_hpc.states import Fault

# --- extraction of code: pure functions, standard library only; nothing here runs the model's code

MAX_TEXT_CHARS: Final = 1 << 20  # Longer texts count as no answer
MAX_PARSED_CHARS: Final = 1 << 14  # Longer code is not cut to its whole statements: parsing must stay quick and shallow
MAX_CUT_LINES: Final = 60
MAX_LINE_CHARS: Final = 400  # Characters of a line that decide whether it is code or prose
INDENT: Final = 4  # Indent of function bodies in all HumanEval prompts
FENCE: Final = "```"

_INDENT = re.compile(r"^[^\S\n]+|[\u200b\u2060\ufeff]+", re.MULTILINE)
_TILDES = re.compile(r"^[ \t]*~~~+", re.MULTILINE)
_LANGUAGE = re.compile(r"[ \t]*(?:python|python3|py|py3|pycon|ipython)(?=[\s{:,]|\Z)", re.IGNORECASE)
_ATTRIBUTES = re.compile(
    r"(?:[ \t,:]*(?:\{[^{}\n]{0,200}\}|[\w.:-]+=(?:\"[^\"\n]{0,200}\"|'[^'\n]{0,200}'|[^\s\"'=]+)|[\w.+#/-]+(?![\w.(=:]))){0,20}[ \t]*\n"
)
_INFO = re.compile(r"[ \t]*(?:\{[.\w][^{}:\n]{0,200}\}|[\w.+#/:-]+)[ \t]*(?=\n)")
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
_TOP_RETURN = re.compile(r"^return\b", re.MULTILINE)
_STARTS_MODULE = re.compile(r"(?:from\s+[\w.]+\s+import\s|import\s+\w[\w., ]*$|(?:async\s+)?def\s+\w|class\s+\w|@\w)")
_CODE = re.compile(
    r"""
    (?:from\s+[\w.]+\s+import\s | import\s+\w[\w., ]*$ | @\w | \# | [)\]}(\[{] | [rfbu]{0,2}["'])
  | (?:if|for|while|with|else|elif|try|except|finally|async|def|class|match|case)\b.*:
  | (?:def|class|async)\s+\w+\s*\(                  # a signature of several lines
  | (?:return|raise|assert|pass|del|yield|global|nonlocal|break|continue)\b
  | [A-Za-z_][\w.]*\s?\(                            # a call
  | [*(]?TARGET(?:\s?,\s?[*(]?TARGET)*\)?\s?(?:[-+*/%&|^@]|//|\*\*|<<|>>)?=(?!=)   # an assignment
  | [A-Za-z_]\w*\s?:\s?[A-Za-z][\w.\[\], |]*=
    """.replace("TARGET", r"[A-Za-z_]\w*(?:\.\w+|\[[^\]]{0,80}\])*"),
    re.VERBOSE,
)


def completion(answer: str, entry_point: str) -> str:
    """Return what follows the prompt: a function body, or a full definition of `entry_point`.

    1. Thinking is removed, as for GSM8K.
    2. Of several fenced blocks, the first that defines the function counts, otherwise the first non-empty one; only a head, a
       stub or the prompt again is passed over. A fence may have any info string, be the only one (then the text before or after
       it counts), or have code on its own line. Without a fence,
       prose is cut off: text before the first import or definition, and from the first unindented line that is not code.
    3. An unindented definition of the function is used unchanged.
    4. Anything else is a body. It is indented if it starts unindented; the indent is restored if only the first line has lost
       it; another indent is changed to the prompt's four.
    5. What can't be parsed is kept to its last whole statement, because a token limit cuts answers off.
    """
    if len(answer) > MAX_TEXT_CHARS:
        return ""
    text = without_thinking(answer).replace("\r\n", "\n")
    text = _TILDES.sub(FENCE, _INDENT.sub(lambda indent: plain_characters(indent[0]).replace("\xa0", " "), text))
    code, fenced = _code(text, entry_point)
    whole = textwrap.dedent(code)
    if _defines(whole, entry_point) and not _TOP_RETURN.search(whole):
        return "\n" + _whole_statements(_FUTURE.sub("", whole if fenced else _without_prose(whole)), "") + "\n"
    return _whole_statements(_as_body(code, fenced), "def f():\n") + "\n"


def _whole_statements(code: str, head: str) -> str:
    """Return the code without the lines at its end that keep it from being parsed behind `head`; unchanged if nothing helps."""
    if len(code) > MAX_PARSED_CHARS:
        return code
    lines = code.split("\n")
    for kept in range(len(lines), max(0, len(lines) - MAX_CUT_LINES), -1):
        if (kept == len(lines) or lines[kept - 1].strip()) and _parses(head + "\n".join(lines[:kept])):
            return "\n".join(lines[:kept])
    return code


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _is_stub(block: str, name: str) -> bool:
    """Return whether a block defines the function without doing anything in it: a head, a docstring, `pass`, `...`."""
    code = textwrap.dedent(block)
    if len(code) > MAX_PARSED_CHARS or not _defines(code, name):
        return False
    try:
        found = [node for node in ast.parse(code).body if getattr(node, "name", "") == name]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        head = re.search(rf"def\s+{re.escape(name)}\b.*", code, re.DOTALL)
        return head is not None and not _parses(code) and _parses(code.rstrip() + "\n    pass\n")
    return bool(found) and all(
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _does_nothing(node.body) for node in found
    )


def _does_nothing(body: Sequence[ast.stmt]) -> bool:
    def idle(node: ast.stmt) -> bool:
        if isinstance(node, ast.Raise):
            return "NotImplemented" in ast.dump(node)
        return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))

    return all(map(idle, body))


def _defines(code: str, name: str) -> bool:
    return (
        re.search(rf"^(?:async\s+def|def)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", code, re.MULTILINE) is not None
    )


def _code(text: str, entry_point: str) -> tuple[str, bool]:
    """Return the code, and whether it was in a fence."""
    parts = [part.lstrip("`") for part in text.split(FENCE)]
    if len(parts) == 1:
        return text, False
    if len(parts) == 2:
        return _beside_one_fence(parts[0], parts[1], entry_point)
    blocks = [block for part in parts[1::2] if (block := _without_info(part)).strip()]
    done = [block for block in blocks if not _is_stub(block, entry_point)]
    defining = [block for block in done if _defines(textwrap.dedent(block), entry_point)]
    around = [
        _without_info(part) for part in parts[::2] if _defines(textwrap.dedent(part), entry_point)
    ]  # a fence inside a fence
    return (defining or around or done or blocks or [""])[0], True


def _beside_one_fence(before: str, after: str, entry_point: str) -> tuple[str, bool]:
    """Return what a single fence opens (the answer was cut off) or closes (the answer begins inside the block)."""
    opened = _without_info(after)
    for side, fenced in ((opened, True), (before, False)):
        if _defines(textwrap.dedent(side), entry_point):
            return side, fenced
    if not after.strip():
        return before, False
    closes = before.strip() and opened.lstrip("\n") == after.lstrip("\n") and before.lstrip("\n").startswith(" ")
    return (before, False) if closes else (opened, True)


def _without_info(block: str) -> str:
    """Return the block without the info string of its fence: a language, a file's name, attributes. Code on that line stays."""
    if named := _LANGUAGE.match(block):
        rest = _ATTRIBUTES.match(block, named.end())
        return block[rest.end() if rest else named.end() :].removeprefix(" ")
    info = _INFO.match(block)
    word = info[0].strip() if info else ""
    return block[info.end() + 1 :] if info and (word.startswith("{") or not _CODE.match(word)) else block


def _without_prose(code: str) -> str:
    lines = code.split("\n")
    start = next((n for n, line in enumerate(lines) if _STARTS_MODULE.match(line[:MAX_LINE_CHARS])), 0)
    return "\n".join(_until_prose(lines[start:]))


def _until_prose(lines: list[str]) -> list[str]:
    """Return the lines before the first unindented line that is not code. Never cuts inside a triple-quoted string."""
    quoted = False
    for number, line in enumerate(lines):
        if not quoted and line[:1].strip() and not _CODE.match(line[:MAX_LINE_CHARS]):
            return lines[:number]
        quoted ^= bool((line.count('"""') + line.count("'''")) % 2)
    return lines


def _as_body(code: str, fenced: bool) -> str:
    lines = [_spaces(line) for line in code.split("\n")]
    start = next((number for number, line in enumerate(lines) if line), len(lines))
    if not fenced:
        last_indented = max((number for number, line in enumerate(lines) if line[:1] == " "), default=-1)
        while start <= last_indented and not _CODE.match(lines[start].strip()[:MAX_LINE_CHARS]):
            start += 1  # "Here is the body:"
    lines = lines[start:] if fenced else _until_prose(lines[start:])
    if not lines:
        return ""
    own = _depth(lines[0])
    if own == 0:
        own = _lost(lines)
        lines[0] = " " * own + lines[0]
    if own == INDENT:
        return "\n".join(lines)
    return "\n".join(_moved(line, INDENT - own) if _depth(line) >= own else line for line in lines)


def _lost(lines: list[str]) -> int:
    """Return the indent that a body's first line has lost; 0 if the whole body is unindented."""
    rest: list[int] = []
    for line in lines[1:]:
        if line.strip():
            rest.append(_depth(line))
    if not rest or rest[0] == 0:
        return 0
    inside = rest[: rest.index(0)] if 0 in rest else rest
    if not lines[0].split("#", 1)[0].rstrip().endswith(":"):
        return min(inside)
    # After `for ...:` the next line is deeper in either case; a later line in between decides.
    return min(inside) if min(inside) < rest[0] else 0


def _spaces(line: str) -> str:
    """Expand the leading tabs of a line; return "" for a blank line."""
    bare = line.lstrip(" \t")
    return line[: len(line) - len(bare)].expandtabs(INDENT) + bare if bare else ""


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _moved(line: str, by: int) -> str:
    if not line.strip():
        return line
    return " " * by + line if by > 0 else line[-by:]


VERSION: Final = "3"
"""Version of the scorer `humaneval`. Version 1 gave programs that sleep 20 seconds; from 3 on stubs are passed over, any info string
is dropped, and cut-off code is kept to its last whole statement."""
OPENCOMPASS_VERSION: Final = "a5acc4bb-2"
"""Version of the scorer `humaneval-opencompass`: the commit whose extraction it reproduces, and how programs are run."""
OPENCOMPASS_LIMITS: Final = ProgramLimits(cpu_s=3)
"""OpenCompass's three seconds, but of CPU time, because with wall time a score depends on the machine's load."""
KS: Final = (1, 10)
UNCONFINED: Final = "unconfined"
"""Option of a recipe: run programs even where they can't be kept from writing to their user's files."""

_BLOCK = re.compile(r"```\w*\n(.*?)```", re.DOTALL)


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of `k` samples passes, from `n` samples of which `passed` pass.

    Computes 1 - C(n - passed, k) / C(n, k) as a product without over- or underflow: Chen et al. 2021 (arXiv 2107.03374), 2.1.
    """
    if not 0 <= passed <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {passed} in {n} samples")
    missed = 1.0
    for number in range(n - passed + 1, n + 1):
        missed *= 1.0 - k / number
    return 1.0 - max(missed, 0.0)


def opencompass_completion(answer: str) -> str:
    """Extract the code as OpenCompass does, including its faults.

    Source: open-compass/opencompass @ a5acc4bb, `humaneval_postprocess_v2` of opencompass/datasets/humaneval.py, after the
    model-level `extract-non-reasoning-content`. The first fenced block whose fence ends its line, otherwise the whole text,
    without leading space. Known faults: a bare body loses its first indent, prose without a fence stays, a block that was cut
    off keeps its fence.
    """
    text = opencompass_text(answer)
    block = _BLOCK.search(text)
    return (block[1] if block else text).lstrip()


@dataclass(frozen=True)
class HumanEval:
    """The scorer. A sample counts if its program passes the problem's `check`; of several samples the passing share counts.

    An item's question is the prompt; its data hold `test` and `entry_point`. A program is the prompt and the result of `extract`
    for answer and entry point; a test may also use the prompt's own definitions.
    """

    version: str
    extract: Callable[[str, str], str]
    limits: ProgramLimits

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """See the Protocol. Raises AutorlError: an item holds no test, or programs can't be run here."""
        programs = [[self._program(item, text) for text in texts] for item, texts in zip(items, answers, strict=True)]
        distinct = list(dict.fromkeys(program for drawn in programs for program in drawn))
        unconfined = context.options.get(UNCONFINED, False) is True
        told = run_programs(distinct, workers=context.workers, limits=self.limits, unconfined=unconfined)
        verdicts = dict(zip(distinct, told, strict=True))
        return [_outcome([verdicts[program] for program in drawn]) for drawn in programs]

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        """Return `pass@1` and, with at least ten samples, `pass@10`, in percent."""
        counts = [(int(o.facts["samples"]), int(o.facts["passed"])) for o in outcomes]
        fewest = min((n for n, _ in counts), default=0)
        return {
            f"pass@{k}": 100.0 * sum(pass_at_k(n, passed, k) for n, passed in counts) / len(counts)
            for k in KS
            if k <= fewest
        }

    def longest_s(self, calls: int, context: Context) -> float:
        return longest_s(calls, context.workers, self.limits)

    def _program(self, item: ItemLike, answer: str) -> Program:
        test, entry_point = item.data.get("test"), item.data.get("entry_point")
        if not isinstance(test, str) or not isinstance(entry_point, str):
            raise AutorlError(
                f"item {item.id} has no test and entry point",
                fault=Fault.GRADER,
                next_step="a task with this scorer needs both in each held-out item: see tasks/humaneval/prepare.py",
                exit_code=Exit.FAILED,
            )
        prompt = item.question if item.question.endswith("\n") else f"{item.question}\n"
        return Program(prompt + self.extract(answer, entry_point), test, entry_point, helpers=prompt)


HUMANEVAL: Final = HumanEval(VERSION, completion, ProgramLimits())
HUMANEVAL_OPENCOMPASS: Final = HumanEval(
    OPENCOMPASS_VERSION, lambda answer, _: opencompass_completion(answer), OPENCOMPASS_LIMITS
)


def _outcome(verdicts: Sequence[ProgramVerdict]) -> Outcome:
    passed = sum(verdict.passed for verdict in verdicts)
    facts: Mapping[str, Fact] = {
        "samples": len(verdicts),
        "passed": passed,
        "isolation": verdicts[0].isolation,
        "reason": str(next((verdict.reason for verdict in verdicts if not verdict.passed), verdicts[0].reason)),
    }
    return Outcome(passed / len(verdicts), facts)
