"""What a judge says about an answer to a DeepSearchQA question: JSON with a truth value for each expected item, and what the
answer gives beside them.

`read` takes the many ways in which models break JSON: code fences, prose around it, trailing commas, single quotes, unescaped
quotes in the explanation, other letter case of keys. It never guesses a verdict: what is cut off inside of it, has values that are
no truth values, or is there twice with different content is unreadable. `read_official` is the benchmark's own rule.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from autorl_hpc.rollouts.search.matching import Counts
from autorl_hpc.scoring.thinking import without_closed_thinking

DETAILS, EXCESSIVE = "Correctness Details", "Excessive Answers"
MAX_CHARS: Final = 100_000
"""A verdict has some hundred characters for each item."""
MAX_STARTS: Final = 50
"""Opening brackets that are tried: what has more of them outside of readable JSON is no verdict."""
MAX_DEPTH: Final = 4
NO_ITEM: Final = frozenset({"none", "null", "n/a", "na"})
"""Words that stand for "nothing excessive" or are an item: it can't be told which."""

_KEY = "[\"'\u201c\u2018]?\\s*{}\\s*[\"'\u201d\u2019]?\\s*:\\s*"
_DETAILS_KEY = re.compile(_KEY.format(r"correctness[ _]?details"), re.IGNORECASE)
_EXCESSIVE_KEY = re.compile(_KEY.format(r"excessive[ _]?answers"), re.IGNORECASE)
_TRAILING = re.compile(r",(?=\s*[}\]])")
_COMMENT = re.compile(r"(?m)(?<=[\s,{\[])//[^\"\n]*$")
_QUOTES = str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''")


class Unreadable(ValueError):
    """The judge's words hold no verdict that can be read for certain."""


@dataclass(frozen=True)
class Reading:
    """A verdict.

    Attributes:
        details: of each expected item, whether the answer gives it.
        excessive: what the answer gives beside them.
    """

    details: dict[str, bool]
    excessive: tuple[str, ...]

    def counts(self) -> Counts:
        """As the benchmark counts: true positives, false negatives, false positives."""
        found = sum(self.details.values())
        return Counts(found, len(self.details) - found, len(self.excessive))


def read(text: str) -> Reading:
    """The verdict in a judge's words.

    Raises:
        Unreadable: there is none, or it can't be told which.
    """
    if len(text) > MAX_CHARS:
        raise Unreadable(f"longer than {MAX_CHARS} characters")
    whole = _whole(text)
    if whole is not None:
        return whole
    text, readings, spans = without_closed_thinking(text), [], []
    for value, span in _objects(text):
        reading = _reading(value, MAX_DEPTH)
        if reading is not None:
            readings.append(reading)
            spans.append(span)
    if not readings:
        return _from_parts(text)
    if any(reading != readings[0] for reading in readings):
        raise Unreadable("several verdicts that differ")
    if any(not any(at in span for span in spans) for at in _details_at(text)):
        raise Unreadable("a verdict within another one that is broken: it may be the answer's, quoted")
    return readings[0]


def _whole(text: str) -> Reading | None:
    """The verdict of a reply that is plain JSON and nothing else. It comes first: what such a reply quotes of the answer, marks of
    thinking among it, stays a text."""
    try:
        value = _DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return None
    return _reading(value, MAX_DEPTH)


def _details_at(text: str) -> Iterator[int]:
    """Where a verdict's details begin, in readable JSON or not."""
    for match in _DETAILS_KEY.finditer(text):
        if text[match.end() : match.end() + 1] in ("{", "["):
            yield match.start()


def read_official(text: str) -> Reading:
    """The verdict by the official starter code's rule: a ```json block or the whole text, plain JSON, the two keys as they are
    spelled; wrong or missing excessive answers are none.

    Raises:
        Unreadable: where the rule gives 0.
    """
    body = text.strip()
    start = body.find("```json")
    if start >= 0:
        body = body[start + len("```json") :].strip()
        end = body.rfind("```")
        body = body[:end].strip() if end >= 0 else body
    try:
        verdict = json.loads(body)["Answer Correctness"]
        details = verdict[DETAILS]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Unreadable("no verdict by the official rule") from None
    if not isinstance(details, dict) or not all(isinstance(value, bool) for value in details.values()):
        raise Unreadable("the correctness details are no truth values")
    extra = verdict.get(EXCESSIVE)
    whole = isinstance(extra, list) and all(isinstance(each, str) for each in extra)
    return Reading(details, tuple(extra) if whole else ())


class _Object(dict[str, Any]):
    """A JSON object that knows which of its keys stood twice with different values."""

    def __init__(self, pairs: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self.conflicts: set[str] = set()
        for key, value in pairs:
            if str(key) in self and self[str(key)] != value:
                self.conflicts.add(str(key))
            self[str(key)] = value


_DECODER = json.JSONDecoder(object_pairs_hook=_Object, strict=False)


def _objects(text: str) -> Iterator[tuple[Any, range]]:
    """The outermost objects that can be read and where they stand, from left to right; repaired where need be."""
    start, tried = text.find("{"), 0
    while start >= 0 and tried < MAX_STARTS:
        tried += 1
        found = _value_at(text, start)
        if found is not None:
            yield found[0], range(start, found[1])
        start = text.find("{", start + 1 if found is None else found[1])


def _value_at(text: str, start: int) -> tuple[Any, int] | None:
    """The value that begins at a place, and where it ends; None if it can't be read."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        pass
    end = _closing(text, start)
    if end is None:
        return None
    part = text[start:end]
    for repaired in (_TRAILING.sub("", part), _TRAILING.sub("", _COMMENT.sub("", part)), part.translate(_QUOTES)):
        try:
            return _DECODER.decode(_TRAILING.sub("", repaired)), end
        except (ValueError, RecursionError):
            pass
        value = _python_value(repaired)
        if value is not None:
            return value, end
    return None


def _closing(text: str, start: int) -> int | None:
    """Behind the bracket that closes the one at `start`, text in quotes passed over; else, as quotes may be what is broken, by
    brackets alone."""
    return _closed(text, start, quotes='"') or _closed(text, start, quotes="\"'") or _closed(text, start, quotes="")


def _closed(text: str, start: int, quotes: str) -> int | None:
    depth, inside, place = 0, "", start
    while place < len(text):
        char = text[place]
        if inside:
            if char == "\\":
                place += 1
            elif char == inside:
                inside = ""
        elif char in quotes:
            inside = char
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if depth == 0:
                return place + 1
        place += 1
    return None


def _python_value(text: str) -> Any:
    """An object in Python's spelling (single quotes, True), None if it is none."""
    words = re.sub(
        r"\b(true|false|null)\b", lambda match: {"true": "True", "false": "False", "null": "None"}[match[1]], text
    )
    try:
        return _plain(ast.parse(words.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _plain(node: ast.expr) -> Any:
    if isinstance(node, ast.Dict) and None not in node.keys:
        return _Object([(_plain(key), _plain(value)) for key, value in zip(node.keys, node.values, strict=True) if key])
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_plain(each) for each in node.elts]
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bool, int, float, type(None))):
        return node.value
    raise ValueError("no plain value")


def _reading(value: Any, depth: int) -> Reading | None:
    """The verdict in an object or below it; None if it speaks of none.

    Raises:
        Unreadable: it speaks of one, but what it says is no verdict.
    """
    if isinstance(value, list) and depth:
        return next((found for each in value if (found := _reading(each, depth - 1)) is not None), None)
    if not isinstance(value, _Object):
        return None
    named = {re.sub(r"[\s_]+", "", key).casefold(): key for key in value}
    details, excessive = named.get("correctnessdetails"), named.get("excessiveanswers")
    if details is not None and excessive is not None:
        if {details, excessive} & value.conflicts:
            raise Unreadable("a key stands twice with different values")
        return Reading(_details(value[details]), _excessive(value[excessive]))
    if not depth:
        return None
    below = [verdict for each in value.values() if (verdict := _reading(each, depth - 1)) is not None]
    if any(verdict != below[0] for verdict in below) or (below and value.conflicts):
        raise Unreadable("several verdicts that differ")
    return below[0] if below else None


def _details(value: Any) -> dict[str, bool]:
    if isinstance(value, list) and all(isinstance(each, _Object) and len(each) == 1 for each in value):
        value = _Object([pair for each in value for pair in each.items()])
    if not isinstance(value, _Object) or not value:
        raise Unreadable("the correctness details are no object with items")
    if value.conflicts:
        raise Unreadable("an item stands twice with different values")
    return {item: _truth(said) for item, said in value.items()}


def _truth(value: Any) -> bool:
    if isinstance(value, str) and value.strip().casefold() in ("true", "false"):
        return value.strip().casefold() == "true"
    if not isinstance(value, bool):
        raise Unreadable(f"{value!r:.40} is no truth value")
    return value


def _excessive(value: Any) -> tuple[str, ...]:
    rows = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(row, bool) or not isinstance(row, (str, int, float)) for row in rows):
        raise Unreadable("the excessive answers are no list of texts")
    items = tuple(text for row in rows if (text := str(row).strip()))
    if any(item.casefold() in NO_ITEM for item in items):
        raise Unreadable("it can't be told whether a word for nothing is an excessive answer")
    return items


def _from_parts(text: str) -> Reading:
    """The two parts that count, each by itself, where something else broke the whole: quotes in the explanation, as a rule. Both
    must be there once and be whole."""
    parts = []
    for key in (_DETAILS_KEY, _EXCESSIVE_KEY):
        places = [match.end() for match in key.finditer(text)]
        if len(places) != 1:
            raise Unreadable("no verdict in it" if not places else "parts of several verdicts")
        found = _value_at(text, places[0])
        if found is None:
            raise Unreadable("a part of the verdict is cut off or broken")
        parts.append(found[0])
    return Reading(_details(parts[0]), _excessive(parts[1]))
