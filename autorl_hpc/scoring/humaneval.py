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
MAX_PARSED_CHARS: Final = 1 << 14  # Longer code is cut to this: parsing must stay quick and shallow
MAX_CUTS: Final = 60  # Each takes away at least one line, usually all from the first wrong one on
MAX_LINE_CHARS: Final = 400  # Characters of a line that decide whether it is code or prose
INDENT: Final = 4  # Indent of function bodies in all HumanEval prompts
FENCE: Final = "```"
_INDENT = re.compile(r"^[^\S\n]+|[\u200b\u2060\ufeff]+", re.MULTILINE)
_TILDES = re.compile(r"^[ \t]*~~~+", re.MULTILINE)
_LANGUAGE = re.compile(r"[ \t]*(?:python|python3|py|py3|pycon|ipython)(?=[\s{:,]|\Z)", re.IGNORECASE)
_BRACES = re.compile(r"\{[^}]*\}\s*(?:$|[\w{])")
_ATTRIBUTE = re.compile(r"[\[({]|[\w.:-]+=\S")
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
_TOP_RETURN = re.compile(r"^return\b[^\S\n]*[^\s#]", re.MULTILINE)
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
    2. Of several fenced blocks, the first that defines the function counts, otherwise the first non-empty one; skeletons are passed
       over. Without a fence, prose is cut off before the first import or definition and from the first line that is not code.
    3. An unindented definition of the function is used unchanged.
    4. Anything else is a body, moved to the prompt's indent; one that only the first line has lost is restored.
    5. What can't be parsed is kept to its last whole statement, because a token limit cuts answers off.
    """
    if len(answer) > MAX_TEXT_CHARS:
        return ""
    text = without_thinking(answer).replace("\r\n", "\n")
    text = _TILDES.sub(FENCE, _INDENT.sub(lambda indent: plain_characters(indent[0]).replace("\xa0", " "), text))
    code, fenced = _code(text, entry_point)
    whole = textwrap.dedent(code)
    if _defines(whole, entry_point) and not _TOP_RETURN.search(whole):
        if not fenced:
            lines = whole.split("\n")
            start = next((n for n, line in enumerate(lines) if _STARTS_MODULE.match(line[:MAX_LINE_CHARS])), 0)
            whole = "\n".join(_until_prose(lines[start:]))
        return "\n" + _whole_statements(_FUTURE.sub("", whole), "") + "\n"
    return _whole_statements(_as_body(code, fenced), "def f():\n") + "\n"


def _whole_statements(code: str, head: str) -> str:
    """Return the code without the lines at its end that keep it from being parsed behind `head`; unchanged if nothing helps."""
    lines = code[:MAX_PARSED_CHARS].split("\n")[: None if len(code) <= MAX_PARSED_CHARS else -1]
    wrong: int | None = None
    for _ in range(MAX_CUTS):
        wrong = _wrong_line(head + "\n".join(lines)) if lines else None
        wrong = wrong or (_idle_end(lines) if not head else None)
        if wrong is None:
            break
        lines = lines[: max(0, min(len(lines), wrong - head.count("\n")) - 1)]
    return "\n".join(lines) if any(map(str.strip, lines)) and wrong is None else code


def _wrong_line(code: str) -> int | None:
    """Return the number of the line, from 1, at which the code can't be parsed; None if it can."""
    try:
        compile(code, "<answer>", "exec", dont_inherit=True)
    except SyntaxError as error:
        return max(1, error.lineno or 1)
    except (ValueError, RecursionError, MemoryError):
        return 1
    return None


def _idle_end(lines: Sequence[str]) -> int | None:
    """Return the line of the last statement if it is a cut-off word or an import that nothing uses: it can only fail."""
    tree = ast.parse("\n".join(lines))
    last = tree.body[-1] if tree.body else None
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imported = last.names if isinstance(last, ast.Import | ast.ImportFrom) else []
    word = last.value if isinstance(last, ast.Expr) else last.test if isinstance(last, ast.Assert) else None
    idle = isinstance(word, ast.Name | ast.Attribute)
    idle |= bool(imported) and used.isdisjoint((name.asname or name.name).split(".")[0] for name in imported)
    return last.lineno if last is not None and idle else None


def _is_stub(block: str, name: str) -> bool:
    """Return whether a block does nothing, or defines the function without reading its arguments: a head, a docstring, comments,
    `pass`, `...`, a refusal, a constant."""
    code = textwrap.dedent(block)
    if len(code) > MAX_PARSED_CHARS:
        return False
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        head = re.search(rf"def\s+{re.escape(name)}\b.*", code, re.DOTALL)
        return head is not None and _wrong_line(code.rstrip() + "\n    pass\n") is None
    functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    own = [function for function in functions if function.name == name]
    nodes = [node for statement in own or body for node in ast.walk(statement)]
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if own:
        return read.isdisjoint(node.arg for node in nodes if isinstance(node, ast.arg))
    return not functions and all("NotImplemented" in word for word in read)


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
    # a fence inside a fence
    around = [_without_info(part) for part in parts[::2] if _defines(textwrap.dedent(part), entry_point)]
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
    line, newline, rest = block.partition("\n")
    if not line.strip() and _LANGUAGE.fullmatch(
        rest.partition("\n")[0].rstrip()
    ):  # the language alone in the line below
        return rest.partition("\n")[2]
    language = _LANGUAGE.match(line)
    code = line[language.end() :].removeprefix(" ") if language else line
    stays = _CODE.match(code.strip()[:MAX_LINE_CHARS]) and not (_ATTRIBUTE if language else _BRACES).match(code.strip())
    return code + newline + rest if stays or not (line.strip() and newline) else rest


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
    return "\n".join(" " * INDENT + line[own:] if line and _depth(line) >= own else line for line in lines)


def _lost(lines: list[str]) -> int:
    """Return the indent that a body's first line has lost; 0 if the whole body is unindented."""
    rest = [_depth(line) for line in lines[1:] if line]
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


VERSION: Final = "5"  # Version of the scorer `humaneval`
OPENCOMPASS_VERSION: Final = "a5acc4bb-2"
"""Version of the scorer `humaneval-opencompass`: the commit whose extraction it reproduces, and how programs are run."""
OPENCOMPASS_LIMITS: Final = ProgramLimits(cpu_s=3)
"""OpenCompass's three seconds, but of CPU time, because with wall time a score depends on the machine's load."""
KS: Final = (1, 10)
UNCONFINED: Final = "unconfined"
"""Option of a recipe: run programs even where they can't be kept from writing to their user's files."""
_BLOCK = re.compile(r"```\w*\n(.*?)```", re.DOTALL)


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of `k` samples passes: 1 - C(n - passed, k) / C(n, k), as a product
    without over- or underflow (Chen et al. 2021, arXiv 2107.03374, 2.1)."""
    if not 0 <= passed <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {passed} in {n} samples")
    missed = 1.0
    for number in range(n - passed + 1, n + 1):
        missed *= 1.0 - k / number
    return 1.0 - max(missed, 0.0)


def opencompass_completion(answer: str) -> str:
    """Extract the code as OpenCompass does, including its faults (a bare body loses its first indent, prose without a fence
    stays). Source: open-compass/opencompass @ a5acc4bb, `humaneval_postprocess_v2` of opencompass/datasets/humaneval.py."""
    text = opencompass_text(answer)
    block = _BLOCK.search(text)
    return (block[1] if block else text).lstrip()


@dataclass(frozen=True)
class HumanEval:
    """The scorer. A sample counts if its program (prompt and extracted answer) passes the problem's `check`; of several samples
    the passing share counts. An item's question is the prompt; its data hold `test` and `entry_point`."""

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
            what = f"item {item.id} has no test and entry point"
            advice = "a task with this scorer needs both in each held-out item: see tasks/humaneval/prepare.py"
            raise AutorlError(what, fault=Fault.GRADER, next_step=advice, exit_code=Exit.FAILED)
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
