"""Files of an agent's code as syntax trees. Whatever is no code, too large or broken becomes a note and never an exception."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import tokenize
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_FILE_CHARS = 400_000
"""A training script has less than a tenth of it; more is data or generated."""

MAX_ALL_CHARS = 4_000_000
"""Of all files of one revision: some seconds of parsing."""

MAX_FILES = 400
"""Looked at in one revision; those with a word of training in them first."""

MAX_CACHED = 256
"""Parsed files kept in a caller's cache: some 100 MB at worst."""

MAX_LINE_CHARS = 160
"""Of a line shown as evidence."""

PYTHON = (".py", ".ipynb", ".pyw")
SHELL = (".sh", ".bash", ".slurm", ".sbatch")
CONFIGS = (".yaml", ".yml", ".json", ".toml")
READ = PYTHON + SHELL + CONFIGS
_CODE_WORDS = re.compile(
    r"train|torch|transformers|trl|loss|model|subprocess|os\.system|exec|llm|copy|def |import ", re.I
)


@dataclass
class Source:
    """One file, read. `tree` is None where it is no Python, or where Python's parser refuses it."""

    path: str
    text: str
    digest: str
    tree: ast.Module | None = None
    words: tuple[tuple[str, int], ...] = ()
    """Names and their lines, of a file whose tree is None: outside comments and strings."""
    note: str | None = None
    lines: tuple[str, ...] = field(default=(), repr=False)
    declared: list[ast.Call | ast.ClassDef] | None = field(default=None, repr=False)
    """Calls and classes by which options are declared; found when first asked for."""

    def line(self, number: int) -> str:
        """Line `number` (from 1), shortened; empty where there is none."""
        if not 1 <= number <= len(self.lines):
            return ""
        text = self.lines[number - 1].strip()
        return text if len(text) <= MAX_LINE_CHARS else text[: MAX_LINE_CHARS - 1] + "…"


def sources(
    files: Mapping[str, str | bytes], cache: MutableMapping[str, Any] | None = None
) -> tuple[dict[str, Source], tuple[str, ...]]:
    """Files of interest by path, sorted, and notes on what was left out."""
    found: dict[str, Source] = {}
    notes: list[str] = []
    left = MAX_ALL_CHARS
    for path, raw in _chosen(files, notes):
        if len(raw) > MAX_FILE_CHARS:
            notes.append(f"{path}: {len(raw):,} characters, not read")
            continue
        if len(raw) > left:
            notes.append(f"{path}: beyond {MAX_ALL_CHARS:,} characters in all, not read")
            continue
        left -= len(raw)
        found[path] = _cached(path, raw, cache)
        if found[path].note:
            notes.append(f"{path}: {found[path].note}")
    return dict(sorted(found.items())), tuple(notes[:50])


def _chosen(files: Mapping[str, str | bytes], notes: list[str]) -> Sequence[tuple[str, str]]:
    """At most MAX_FILES, near the top first."""
    known = sorted((p for p in files if p.lower().endswith(READ)), key=lambda p: (p.count("/"), p))
    chosen: list[tuple[str, str]] = []
    for path in known:
        raw = files[path]
        head = raw[: MAX_FILE_CHARS + 1]
        if len(raw) > len(head):
            notes.append(f"{path}: {len(raw):,} characters, not read")
            continue
        text = head.decode("utf-8", "replace") if isinstance(head, bytes) else head
        if len(chosen) >= MAX_FILES:
            notes.append(f"{len(known) - MAX_FILES} more files were not read")
            break
        if _CODE_WORDS.search(text) or path.lower().endswith(SHELL + CONFIGS):
            chosen.append((path, text))
    return chosen


def _cached(path: str, text: str, cache: MutableMapping[str, Any] | None) -> Source:
    digest = hashlib.sha256(f"{path}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()
    if cache is not None and isinstance(kept := cache.get(digest), Source):
        return kept
    made = read(path, text, digest)
    if cache is not None:
        while len(cache) >= MAX_CACHED:
            cache.pop(next(iter(cache)))
        cache[digest] = made
    return made


def read(path: str, text: str, digest: str = "") -> Source:
    """One file's text, read as what its name says."""
    note = None
    if path.lower().endswith(".ipynb"):
        text, note = _cells(text)
    made = Source(path, text, digest, note=note, lines=tuple(text.split("\n")))
    if path.lower().endswith(PYTHON):
        made.tree, problem = parsed(text)
        if problem:
            made.note = f"{problem}; its words only were looked at"
            made.words = tuple(_words(text))
    return made


def parsed(text: str) -> tuple[ast.Module | None, str | None]:
    """The tree of a Python text, or why there is none. Python's parser refuses deep nesting by itself, with one of these."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except SyntaxError as error:
        return None, f"no Python 3 (line {error.lineno})"
    except ValueError:
        return None, "no Python (null bytes)"
    except (RecursionError, MemoryError):
        return None, "nested too deeply"
    return tree, None


def _cells(text: str) -> tuple[str, str | None]:
    """Code cells of a notebook as one script; lines for IPython become comments, or keep their command."""
    try:
        cells = json.loads(text).get("cells", [])
        code = ["".join(cell.get("source", [])) for cell in cells if cell.get("cell_type") == "code"]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return "", "no notebook"
    return "\n".join(_python_of_cell(each) for each in code), None


def _python_of_cell(cell: str) -> str:
    lines = []
    for line in cell.split("\n"):
        bare = line.lstrip()
        indent = line[: len(line) - len(bare)]
        if bare.startswith("!"):
            lines.append(f"{indent}__import__('os').system({bare[1:]!r})")
        elif bare.startswith("%"):
            lines.append(f"{indent}pass  # {bare}")
        else:
            lines.append(line)
    return "\n".join(lines)


def _words(text: str) -> list[tuple[str, int]]:
    """Names of a text that has no tree, by Python's tokens as far as they go; then line by line."""
    found: list[tuple[str, int]] = []
    inside = False
    for number, line in enumerate(text.replace("\0", " ").split("\n")[:20_000], start=1):
        quotes = line.count('"""') + line.count("'''")
        skip = inside or quotes > 0 or len(line) > 2_000
        inside ^= quotes % 2 == 1
        if skip:
            continue
        try:
            for token in tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline):
                if token.type == tokenize.NAME:
                    found.append((token.string, number))
        except (tokenize.TokenError, SyntaxError, ValueError):
            continue
    return found
