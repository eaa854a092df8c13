"""Takes the Python code out of a model's answer, as what follows a prompt that ends in a function's docstring.

Pure functions, standard library only, linear in the text's length. Nothing here runs or parses what a model wrote.
"""

from __future__ import annotations

import keyword
import re
import textwrap
from typing import Final

from autorl_hpc.scoring.thinking import without_closed_thinking

MAX_TEXT_CHARS: Final = 1 << 20
"""A longer text is no answer."""
MAX_LINE_CHARS: Final = 400
"""How much of a line is looked at to tell code from prose."""
INDENT: Final = 4
"""Of a function's body, in all prompts of HumanEval."""
FENCE: Final = "```"

_LANGUAGE = re.compile(r"[ \t]*(?:python|python3|py|py3|pycon|ipython)(?=[ \t\n]|\Z)[ \t]*\n?", re.IGNORECASE)
_WORD = re.compile(r"[ \t]*([\w+#.-]*)[ \t]*\n")
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
    """What follows the prompt: a function's body, or a definition of `entry_point` that stands for the prompt's.

    1. Thinking is dropped, as for GSM8K.
    2. Of several fenced blocks the first that defines the function counts, else the first with anything in it. A fence may
       have no language, be the only one (then what is before or after it counts), or have code on its own line. Without a
       fence, prose around the code is cut off: what stands before the first import or definition, and from the first line at
       the margin that is no code.
    3. A definition of the function at the margin counts as it stands.
    4. Anything else is a body. One that starts at the margin is indented, one whose first line alone has lost its indent gets
       it back, and one that is indented in another way is moved to the prompt's four.
    """
    if len(answer) > MAX_TEXT_CHARS:
        return ""
    text = _without_thinking(answer).replace("\r\n", "\n")
    code, fenced = _code(text, entry_point)
    whole = textwrap.dedent(code)
    if _defines(whole, entry_point) and not _TOP_RETURN.search(whole):
        return "\n" + _FUTURE.sub("", whole if fenced else _without_prose(whole)) + "\n"
    return _as_body(code, fenced) + "\n"


def _without_thinking(text: str) -> str:
    return without_closed_thinking(text).rsplit("</think>", 1)[-1].split("<think>", 1)[0]


def _defines(code: str, name: str) -> bool:
    return (
        re.search(rf"^(?:async\s+def|def)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", code, re.MULTILINE) is not None
    )


def _code(text: str, entry_point: str) -> tuple[str, bool]:
    """The code, and whether it stood in a fence."""
    parts = [part.lstrip("`") for part in text.split(FENCE)]
    if len(parts) == 1:
        return text, False
    if len(parts) == 2:
        return _beside_one_fence(parts[0], parts[1], entry_point)
    blocks = [_without_language(block) for block in parts[1::2]]
    defining = [block for block in blocks if _defines(textwrap.dedent(block), entry_point)]
    filled = [block for block in blocks if block.strip()]
    return (defining or filled or [""])[0], True


def _beside_one_fence(before: str, after: str, entry_point: str) -> tuple[str, bool]:
    """What an only fence opens (an answer that was cut off) or closes (one that begins inside the block)."""
    opened = _without_language(after)
    for side, fenced in ((opened, True), (before, False)):
        if _defines(textwrap.dedent(side), entry_point):
            return side, fenced
    if not after.strip():
        return before, False
    closes = before.strip() and opened == after.lstrip("\n") and before.lstrip("\n").startswith(" ")
    return (before, False) if closes else (opened, True)


def _without_language(block: str) -> str:
    """A block without its language; `def` and other words of Python are code."""
    named = _LANGUAGE.match(block)
    if named:
        return block[named.end() :]
    word = _WORD.match(block)
    if word and not keyword.iskeyword(word[1]):
        return block[word.end() :]
    return block


def _without_prose(code: str) -> str:
    lines = code.split("\n")
    start = next((n for n, line in enumerate(lines) if _STARTS_MODULE.match(line[:MAX_LINE_CHARS])), 0)
    return "\n".join(_until_prose(lines[start:]))


def _until_prose(lines: list[str]) -> list[str]:
    """The lines before the first one at the margin that is no code. Inside a long string nothing is cut."""
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
    """The indent that a body's first line has lost; 0 where the whole body stands at the margin."""
    rest: list[int] = []
    for line in lines[1:]:
        if line.strip():
            rest.append(_depth(line))
    if not rest or rest[0] == 0:
        return 0
    inside = rest[: rest.index(0)] if 0 in rest else rest
    if not lines[0].split("#", 1)[0].rstrip().endswith(":"):
        return min(inside)
    # Behind `for ...:` the next line is deeper in either case; a later one between the two tells.
    return min(inside) if min(inside) < rest[0] else 0


def _spaces(line: str) -> str:
    """A line whose tabs at the front are spaces, and that is empty if there is nothing else."""
    bare = line.lstrip(" \t")
    return line[: len(line) - len(bare)].expandtabs(INDENT) + bare if bare else ""


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _moved(line: str, by: int) -> str:
    if not line.strip():
        return line
    return " " * by + line if by > 0 else line[-by:]
