"""Shell scripts as lists of commands: enough of the language for the pipelines that agents write, and no more."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from autorl_hpc.report.routes import loops
from autorl_hpc.report.routes.commands import Command, split, understood

MAX_LINES = 5_000
MAX_JOINED = 300
"""Lines of one command: a quoted program may be long."""
MAX_DEPTH = 5
"""Functions that call functions."""

Arms = tuple[tuple[str, int], ...]
"""The branches in which something stands, from outside in: which question, which answer."""

_HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*|\d)(?::?[-=]([^}]{0,200}))?\}|([A-Za-z_]\w*|\d))")
_FUNCTION = re.compile(
    r"^\s*(?:function\s+)?([A-Za-z_][\w-]*)\s*(?:\(\s*\))\s*\{?\s*$|^\s*function\s+([A-Za-z_][\w-]*)\s*\{?\s*$"
)
_ARRAY = re.compile(r"^\s*([A-Za-z_]\w*)(\+?)=\(")
_WHOLE_ARRAY = re.compile(r"^\$\{([A-Za-z_]\w*)\[[@*]\]\}$")
MAX_ARRAY_CHARS = 20_000
MAX_ARRAY_WORDS = 500
_SEPARATORS = frozenset({";", "&&", "||", "|", "&", ";;", "|&"})
_LEADING = frozenset({"then", "else", "do", "!", "{", "(", "while", "until"})


@dataclass(frozen=True)
class ShellCommand:
    """One command of a script."""

    command: Command
    number: int
    text: str
    arms: Arms = ()


@dataclass
class ShellScript:
    """A script's commands in their order, and the files that it writes by here-documents."""

    lines: list[ShellCommand] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


@dataclass
class _State:
    path: str
    variables: dict[str, str]
    script: ShellScript
    functions: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    blocks: list[list[object]] = field(default_factory=list)  # [question, arm, live]
    depth: int = 0
    over: bool = False
    unclosed: bool = False
    """A loop that never ends was met: what looks like others isn't searched for its end, either."""
    looped: int = 0
    """Lines followed in turns of loops."""


def script(text: str, path: str, args: Sequence[str] = (), env: Sequence[tuple[str, str]] = ()) -> ShellScript:
    """The commands that a script runs with these arguments."""
    variables = dict(env) | {str(n): value for n, value in enumerate(args, start=1)}
    state = _State(path, variables, ShellScript())
    _run(list(enumerate(text.replace("\0", " ").split("\n")[:MAX_LINES], start=1)), state)
    return state.script


def _run(lines: list[tuple[int, str]], state: _State) -> None:
    at = 0
    while at < len(lines) and not state.over:
        number, line = lines[at]
        at += 1
        if (function := _FUNCTION.match(line)) is not None:
            at = _function(function[1] or function[2], lines, at, state)
            continue
        if not state.unclosed and (loop := loops.head(line)) is not None:
            inner = loops.body(lines, at - 1)
            state.unclosed = inner is None
            if inner is not None:
                at = inner[1]
                _loop(*loop, inner[0], state)
                continue
        while line.rstrip().endswith("\\") and at < len(lines):
            line = line.rstrip()[:-1] + " " + lines[at][1]
            at += 1
        while _ARRAY.match(line) and ")" not in line and at < len(lines) and len(line) < MAX_ARRAY_CHARS:
            line = line.rstrip() + " " + lines[at][1].split(" #", 1)[0].strip()
            at += 1
        here = _HEREDOC.search(line) if not line.lstrip().startswith("#") else None
        if here is not None:
            end, body = _heredoc(lines, at, here[2])
            at = end
            _with_body(line, _HEREDOC.sub(" ", line), "\n".join(body), number, state)
            continue
        words = _words(line)
        joined = 0
        while words is None and at < len(lines) and joined < MAX_JOINED:
            line += "\n" + lines[at][1]
            at += 1
            joined += 1
            if "'" in lines[at - 1][1] or '"' in lines[at - 1][1]:
                words = _words(line)
        _commands(words or [], number, line, state)


def _loop(name: str, words: str, body: list[tuple[int, str]], state: _State) -> None:
    """A loop's body for each word that is known; once, with an unknown word, where they aren't."""
    known = _expanded(_words(words) or [], state)
    if not known or any(set(word) & set("$*?`{(") for word in known):
        known = [f"${name}"]
    for turn, word in enumerate(known[: loops.MAX_TURNS]):
        state.looped += len(body)
        if state.depth >= MAX_DEPTH or (turn and state.looped > MAX_LINES):
            return
        state.depth += 1
        state.variables[name] = word
        _run(body, state)
        state.depth -= 1


def _function(name: str, lines: list[tuple[int, str]], at: int, state: _State) -> int:
    body = []
    while at < len(lines) and lines[at][1].rstrip() != "}":
        body.append(lines[at])
        at += 1
    state.functions[name] = body
    return at + 1


def _heredoc(lines: list[tuple[int, str]], at: int, mark: str) -> tuple[int, list[str]]:
    body = []
    while at < len(lines) and lines[at][1].strip() != mark:
        body.append(lines[at][1])
        at += 1
    return at + 1, body


def _with_body(line: str, bare: str, body: str, number: int, state: _State) -> None:
    """A here-document: the text of a new file, a program, or a comment."""
    words = _words(bare) or []
    writes = next((words[n + 1] for n, w in enumerate(words[:-1]) if w in (">", ">>")), None)
    if words[:1] == ["tee"] and len(words) > 1:
        writes = words[-1]
    if writes is not None:
        if _live(state):
            state.script.files[posixpath.normpath(_filled(writes, state))] = body
        return
    command = understood([w for w in words if w not in ("<", "-")])
    if words[:1] == ["cat"] or words[:1] == [":"]:
        return
    if "python" in (words[0] if words else "") or command.target == "python":
        words = [_filled(w, state) for w in words]
        at = words.index("-") + 1 if "-" in words else len(words)
        _add(Command("inline", body, tuple(_without_redirections(words[at:]))), number, line, state)
    elif words[:1] and words[0] in ("bash", "sh") and state.depth < MAX_DEPTH:
        state.depth += 1
        _run([(number, each) for each in body.split("\n")], state)
        state.depth -= 1


def _words(line: str) -> list[str] | None:
    """Words with separators apart; None: a quote is open."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.commenters = "#"
    lexer.whitespace_split = True
    lexer.wordchars += "$"
    try:
        return list(lexer)
    except ValueError:
        return None


def _commands(words: list[str], number: int, text: str, state: _State) -> None:
    part: list[str] = []
    for word in [*words, ";"]:
        if word in _SEPARATORS or (word and set(word) <= set(";&|")):
            _one(part, number, text, state)
            part = []
        else:
            part.append(word)


def _one(words: list[str], number: int, text: str, state: _State) -> None:
    while words and (words[0] in _LEADING or words[0] in ("if", "elif", "fi", "esac", "done", "case")):
        head = words[0]
        if head == "if":
            state.blocks.append([f"{state.path}:{number}", 0, _condition(words[1:], state)])
            return
        if head == "case":
            state.blocks.append([f"{state.path}:{number}", 0, _filled(words[1], state) if len(words) > 1 else None])
            words = words[3:]
            _case_arm(words, number, text, state)
            return
        if head in ("elif", "else") and state.blocks:
            block = state.blocks[-1]
            block[1] = int(str(block[1])) + 1
            block[2] = {True: False, False: True}.get(block[2]) if isinstance(block[2], bool) else None
            if head == "elif" and block[2] is True:
                block[2] = _condition(words[1:], state)
        if head in ("fi", "esac") and state.blocks:
            state.blocks.pop()
        if head == "elif":
            return
        words = words[1:]
    if (words and len(words) > 1 and words[1] == ")") or (words and words[0].endswith(")") and state.blocks):
        _case_arm(words, number, text, state)
        return
    if len(words) > 1 and words[1] == "(" and (array := _ARRAY.match(words[0] + "(")) is not None and _live(state):
        before = state.arrays.get(array[1], []) if array[2] else []
        state.arrays[array[1]] = (before + _expanded([w for w in words[2:] if w != ")"], state))[:MAX_ARRAY_WORDS]
        return
    words = _without_redirections([w for w in words if w not in ("(", ")", "}")])
    if not words or not _live(state):
        return
    if all(re.match(r"^[A-Za-z_]\w*=", w) for w in words) or words[0] in ("export", "local", "declare", "readonly"):
        for word in words:
            name, equals, value = word.partition("=")
            if equals:
                state.variables[name] = _filled(value, state)
        return
    if words := _expanded(words, state):
        _run_words(words, number, text, state)


def _case_arm(words: list[str], number: int, text: str, state: _State) -> None:
    if not state.blocks or ")" not in " ".join(words):
        return
    at = next((n for n, w in enumerate(words) if w.endswith(")")), 0)
    patterns = "".join(words[: at + 1]).rstrip(")").lstrip("(").split("|")
    block = state.blocks[-1]
    block[1] = int(str(block[1])) + 1
    if len(block) == 3:
        block.append(block[2])
    asked = block[3]
    block[2] = None if not isinstance(asked, str) or "$" in asked or "*" in patterns else asked in patterns
    _one(words[at + 1 :], number, text, state)


def _without_redirections(words: list[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in (">", ">>", "<", ">&", "&>", "<<<") or re.match(r"^\d?>+&?$", word):
            skip = True
            if kept and kept[-1] in ("1", "2"):
                kept.pop()
        else:
            kept.append(word)
    return kept


def _run_words(words: list[str], number: int, text: str, state: _State) -> None:
    if words[0] == "exit" and not state.blocks and state.depth == 0:
        state.over = True
        return
    if words[0] in state.functions and state.depth < MAX_DEPTH:
        state.depth += 1
        outer = {k: v for k, v in state.variables.items() if k.isdigit()}
        inner = {str(n): value for n, value in enumerate(words[1:], start=1)}
        state.variables = {k: v for k, v in state.variables.items() if not k.isdigit()} | inner
        _run(state.functions[words[0]], state)
        state.variables = {k: v for k, v in state.variables.items() if not k.isdigit()} | outer
        state.depth -= 1
        return
    _add(understood(words), number, text, state)


def _add(command: Command, number: int, text: str, state: _State) -> None:
    if command.kind == "other" or not _live(state) or len(state.script.lines) >= MAX_LINES:
        return
    env = (*((k, v) for k, v in state.variables.items() if not k.isdigit()), *command.env)
    arms = tuple((str(question), int(str(arm))) for question, arm, *_ in state.blocks if _[0] is None)
    full = Command(command.kind, command.target, command.args, env)
    state.script.lines.append(ShellCommand(full, number, " ".join(text.split())[:300], arms))


def _live(state: _State) -> bool:
    return all(block[2] is not False for block in state.blocks)


def _condition(words: Sequence[str], state: _State) -> bool | None:
    if list(words[:1]) == ["false"]:
        return False
    if list(words[:1]) in (["true"], [":"]):
        return True
    inner = [_filled(w, state) for w in words if w not in ("[", "]", "[[", "]]")]
    if len(inner) == 3 and inner[1] in ("=", "==", "!=", "-eq", "-ne") and "$" not in inner[0] + inner[2]:
        return (inner[0] == inner[2]) == (inner[1] in ("=", "==", "-eq"))
    return None


def _expanded(words: Sequence[str], state: _State) -> list[str]:
    """Words with their variables; those that stand for several words, or for none, become these."""
    found: list[str] = []
    for word in words:
        several = _several(word, state)
        found += [_filled(word, state)] if several is None else several
    return found[:MAX_ARRAY_WORDS]


def _several(word: str, state: _State) -> list[str] | None:
    if word in ("$@", "$*", "${@}", "${*}"):
        return [state.variables[n] for n in sorted((k for k in state.variables if k.isdigit()), key=int)]
    if (array := _WHOLE_ARRAY.match(word)) is not None:
        return state.arrays.get(array[1])
    if (variable := _VARIABLE.fullmatch(word)) is not None:
        value = _filled(word, state)
        if value == "" and variable[2] is None:
            return []
        if value.startswith("-") and " " in value:  # options in one variable, as `$ARGS` without quotes
            return split(value)
    return None


def _filled(word: str, state: _State) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        known = state.variables.get(name)
        if known is not None and (known != "" or match[2] is None):
            return known
        return match[2] if match[2] is not None else match[0]

    for _ in range(3):
        filled = _VARIABLE.sub(value, word)[:20_000]
        if filled == word:
            break
        word = filled
    return word
