"""Scorers of DeepSearchQA: `deepsearchqa` asks a judge and parses its verdict; `deepsearchqa-exact` compares normalised texts.
An item's outcome is 1 if everything expected and nothing else is given, as the exact paired test needs. Source: the starter
code of google/deepsearchqa (arXiv 2601.20975, section 3)."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from autorl_hpc.rollouts.search.matching import SET, SINGLE, Counts, compare
from autorl_hpc.scoring.gsm8k import without_closed_thinking
from autorl_hpc.scoring.outcome import UNREAD_SHARE, Context, Fact, ItemLike, JudgeFailed, Outcome, Verdict, mean

# --- parsing of verdicts: JSON with a truth value per expected item, and a list of excessive answers
# `read` repairs common damage (fences, prose, trailing commas, quotes) and never guesses: a verdict is unreadable if it is cut off, has
# other values, or occurs twice with different content. A judge quotes the answer, which may hold a verdict: `read` does not search
# inside unreadable objects, and refuses a text that has a verdict's key outside of the parsed part.

DETAILS, EXCESSIVE = "Correctness Details", "Excessive Answers"
MAX_CHARS: Final = 100_000  # A verdict takes some hundred characters per item
MAX_STARTS: Final = 50  # Opening brackets to try; a text with more of them outside readable JSON is not a verdict
MAX_DEPTH: Final = 4
QUOTINGS: Final = ('"', "\"'", "")
"""Quote characters to respect, in this order of tries, because quotes may be the broken part."""
NO_ITEM: Final = frozenset({"none", "null", "n/a", "na"})
"""Ambiguous words: they may mean "nothing excessive" or be an item."""
_KEY = "[\"'\u201c\u2018]?\\s*{}\\s*[\"'\u201d\u2019]?\\s*:\\s*"
_DETAILS_KEY = re.compile(_KEY.format(r"correctness[ _]?details"), re.IGNORECASE)
_EXCESSIVE_KEY = re.compile(_KEY.format(r"excessive[ _]?answers"), re.IGNORECASE)
_NAMES = tuple(
    re.compile(rf"{name}[\s\\\"'`*\u201c\u201d\u2018\u2019]*[:=]", re.IGNORECASE)
    for name in (r"correctness[\s_]*details", r"excessive[\s_]*answers")
)
"""The verdict's keys in any quotes, also inside other text."""
_LEAD = re.compile(r"(?:json|answer[\s_]*correctness|\W)*", re.IGNORECASE)
_TAIL = re.compile(r"[\s\"'`}\],;.\u201d\u2019]*")
_TRAILING = re.compile(r",(?=\s*[}\]])")
_COMMENT = re.compile(r"(?m)(?<=[\s,{\[])//[^\"\n]*$")
_QUOTES = str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''")


class Unreadable(ValueError):
    """The judge's reply holds no verdict that can be read with certainty."""


@dataclass(frozen=True)
class ParsedVerdict:
    """A verdict: for each expected item, whether the answer gives it (`details`), and what it gives in addition."""

    details: dict[str, bool]
    excessive: tuple[str, ...]

    def counts(self) -> Counts:
        """Return true positives, false negatives and false positives as the benchmark counts them."""
        found = sum(self.details.values())
        return Counts(found, len(self.details) - found, len(self.excessive))


def read(text: str) -> ParsedVerdict:
    """Parse the verdict in a judge's reply. Raises Unreadable: there is none, or it is ambiguous."""
    if len(text) > MAX_CHARS:
        raise Unreadable(f"longer than {MAX_CHARS} characters")
    text = without_closed_thinking(text)
    if "<think>" in text:
        raise Unreadable("its thinking has no end")
    objects, unread = _objects(text)
    verdicts = [(found, reading) for found in objects if (reading := _reading(found.value, MAX_DEPTH)) is not None]
    if not verdicts:
        return _from_parts(text)
    _nothing_beside(text, [found for found, _ in verdicts], unread)
    if any(reading != verdicts[0][1] for _, reading in verdicts):
        raise Unreadable("several verdicts that differ")
    return verdicts[0][1]


def read_official(text: str) -> ParsedVerdict:
    """Parse the verdict by the official starter code's rule: a ```json block or the whole text, plain JSON, keys spelled exactly;
    missing or malformed excessive answers count as none. Unreadable where the rule gives 0."""
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
    return ParsedVerdict(details, tuple(extra) if whole else ())


class _Object(dict[str, Any]):
    """A JSON object that records keys which occur twice with different values."""

    def __init__(self, pairs: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self.conflicts: set[str] = set()
        for key, value in pairs:
            if str(key) in self and self[str(key)] != value:
                self.conflicts.add(str(key))
            self[str(key)] = value


_DECODER = json.JSONDecoder(object_pairs_hook=_Object, strict=False)


class _Found(NamedTuple):
    """An object in a text. `plain`: it was valid JSON without repair."""

    value: Any
    start: int
    end: int
    plain: bool


def _objects(text: str) -> tuple[list[_Found], bool]:
    """Return the outermost readable objects from left to right, repaired if needed, and whether a bracket is never closed. The
    content of unreadable brackets is skipped."""
    found: list[_Found] = []
    start, tried = text.find("{"), 0
    while start >= 0 and tried < MAX_STARTS:
        tried += 1
        value = _value_at(text, start)
        if value is not None:
            found.append(value)
            start = text.find("{", value.end)
            continue
        ends = [_closed(text, start, quotes) for quotes in QUOTINGS]
        if None in ends:
            return found, True
        start = text.find("{", max(end for end in ends if end is not None))
    return found, start >= 0


def _nothing_beside(text: str, verdicts: list[_Found], unread: bool) -> None:
    """Raise Unreadable if the text holds something beside the verdict, which may be a quoted one next to the real one."""
    if unread:
        raise Unreadable("something else in it is cut off or broken")
    for name in _NAMES:
        places = [match.start() for match in name.finditer(text)]
        if any(not any(found.start <= place < found.end for found in verdicts) for place in places):
            raise Unreadable("parts of another verdict stand beside it")
        for found in verdicts:
            if not found.plain and sum(found.start <= place < found.end for place in places) != 1:
                raise Unreadable("parts of several verdicts, and the whole is broken")


def _value_at(text: str, start: int) -> _Found | None:
    try:
        value, end = _DECODER.raw_decode(text, start)
        return _Found(value, start, end, True)
    except (ValueError, RecursionError):
        pass
    # Quoted text is skipped, then brackets alone are counted, because the quotes may be broken.
    closed = next((stop for quotes in QUOTINGS if (stop := _closed(text, start, quotes)) is not None), None)
    if closed is None:
        return None
    part = text[start:closed]
    for repaired in (_TRAILING.sub("", part), _TRAILING.sub("", _COMMENT.sub("", part)), part.translate(_QUOTES)):
        try:
            return _Found(_DECODER.decode(_TRAILING.sub("", repaired)), start, closed, False)
        except (ValueError, RecursionError):
            pass
        value = _python_value(repaired)
        if value is not None:
            return _Found(value, start, closed, False)
    return None


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
    """Return an object in Python's spelling (single quotes, True); None if it is not one."""
    for word, python in (("true", "True"), ("false", "False"), ("null", "None")):
        text = re.sub(rf"\b{word}\b", python, text)
    try:
        return _plain(ast.parse(text.strip(), mode="eval").body)
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


def _reading(value: Any, depth: int) -> ParsedVerdict | None:
    """Return the verdict in an object or nested in it; None without a verdict's keys, Unreadable without valid content."""
    if isinstance(value, list) and depth:
        return next((found for each in value if (found := _reading(each, depth - 1)) is not None), None)
    if not isinstance(value, _Object):
        return None
    named = {re.sub(r"[\s_]+", "", key).casefold(): key for key in value}
    details, excessive = named.get("correctnessdetails"), named.get("excessiveanswers")
    said: list[ParsedVerdict] = []
    if details is not None and excessive is not None:
        if {details, excessive} & value.conflicts:
            raise Unreadable("a key stands twice with different values")
        said = [ParsedVerdict(_details(value[details]), _excessive(value[excessive]))]
    if depth:
        rest = [each for key, each in value.items() if not said or key not in (details, excessive)]
        below = [verdict for each in rest if (verdict := _reading(each, depth - 1)) is not None]
        if below and value.conflicts:
            raise Unreadable("several verdicts that differ")
        said += below
    if any(verdict != said[0] for verdict in said):
        raise Unreadable("several verdicts that differ")
    return said[0] if said else None


def _details(value: Any) -> dict[str, bool]:
    if isinstance(value, list) and all(isinstance(each, _Object) and len(each) == 1 for each in value):
        value = _Object([pair for each in value for pair in each.items()])
    if not isinstance(value, _Object) or not value:
        raise Unreadable("the correctness details are no object with items")
    if value.conflicts:
        raise Unreadable("an item stands twice with different values")
    texts = {item: str(said).strip().casefold() for item, said in value.items() if isinstance(said, bool | str)}
    for item, said in value.items():
        if texts.get(item) not in ("true", "false"):
            raise Unreadable(f"{said!r:.40} is not a truth value")
    return {item: text == "true" for item, text in texts.items()}


def _excessive(value: Any) -> tuple[str, ...]:
    rows = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(row, bool) or not isinstance(row, (str, int, float)) for row in rows):
        raise Unreadable("the excessive answers are no list of texts")
    items = tuple(text for row in rows if (text := str(row).strip()))
    if any(item.casefold() in NO_ITEM for item in items):
        raise Unreadable("it can't be told whether a word for nothing is an excessive answer")
    return items


def _from_parts(text: str) -> ParsedVerdict:
    """Read the two parts that count separately if the whole is broken, usually by quotes in the explanation. Each must occur once
    and be whole, with nothing after them: a quoted verdict is followed by the end of its sentence."""
    parts: list[_Found] = []
    for key, name in zip((_DETAILS_KEY, _EXCESSIVE_KEY), _NAMES, strict=True):
        places = list(key.finditer(text))
        if len(places) != 1 or len(name.findall(text)) != 1:
            raise Unreadable("no verdict in it" if not places else "parts of several verdicts")
        lead = text[: places[0].start()].rstrip()
        if lead.endswith("{") and not _LEAD.fullmatch(lead):
            raise Unreadable("a verdict within the explanation")
        found = _value_at(text, places[0].end())
        if found is None:
            raise Unreadable("a part of the verdict is cut off or broken")
        parts.append(found)
    if not _TAIL.fullmatch(text, max(found.end for found in parts)):
        raise Unreadable("the verdict is broken, and something follows on it")
    return ParsedVerdict(_details(parts[0].value), _excessive(parts[1].value))


VERSION = "2"
EXACT_VERSION = "5"
OFFICIAL = "official"
"""Value of the option `judge_rule`: one request, read by the official rule; an unreadable reply counts as nothing found."""
ROUNDS: Final = 3  # Requests to a judge until its reply is readable; after three failures more won't help
JUDGE_TOKENS: Final = 2048
"""Token limit of a verdict (some items have fifty expected answers). The option `judge_max_tokens` overrides it."""
REMINDERS: Final = (
    "",
    "\n\nReply with the JSON object alone.",
    "\n\nYour last reply could not be read. Reply with the JSON object alone: no text around it, every quotation mark inside a "
    "string escaped.",
)
_FIELDS: Final = ("question", "prompt_type", "correct_answer", "response")
_FIELD = re.compile(rf"\{{\{{|\}}\}}|\{{({'|'.join(_FIELDS)}|mark)\}}")
OF_COUNTS: Final = ("precision", "recall", "f1", "fully_correct", "correct_with_excessive", "fully_incorrect")


def answered(text: str) -> tuple[str, int]:
    """Return the answer in an episode's outcome (registry.py, `encode`) and the number of its actions; a plain text is the answer."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and isinstance(value.get("answer"), str) and "transcript_sha256" in value:
        return value["answer"].strip(), int(value.get("steps", 0))
    return without_closed_thinking(text).strip(), 1


class DeepSearchQA:
    """Scorer `deepsearchqa`: asks a judge about each answer. An empty answer scores as nothing found, without the judge."""

    version = VERSION

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """Return outcomes from the judge's verdicts; of several samples the mean. Raises JudgeFailed: it can't be reached, or
        more than `UNREAD_SHARE` of its replies stay unreadable; fewer score 0 each. With `judge_rule: official` any number
        does."""
        if context.judge is None:
            raise JudgeFailed("no judge was given")
        given = [[answered(text) for text in drawn] for drawn in answers]
        wanted = list(dict.fromkeys((place, text) for place, drawn in enumerate(given) for text, _ in drawn if text))
        questions = [_values(items[place], text) for place, text in wanted]
        found = dict(zip(wanted, _judged(questions, context), strict=True))

        def rate(place: int, answer: str) -> Counts:
            reading = found.get((place, answer))
            return reading.counts() if reading else Counts(0, max(1, _expected(items[place])), 0)

        outcomes = _outcomes(given, rate)
        for place, (outcome, drawn) in enumerate(zip(outcomes, given, strict=True)):
            readings = [found[place, text] for text, _ in drawn if text]
            sizes = [len(reading.details) for reading in readings if reading]
            facts = {
                "judge_unread": mean([reading is None for reading in readings]),
                "items_differ": mean([size != _expected(items[place]) for size in sizes]),
            }
            outcomes[place] = Outcome(outcome.value, {**outcome.facts, **facts})
        return outcomes

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        """Return `figures`, and in percent: `judge_unread` (unreadable replies, counted as 0) and `items_differ` (the judge
        counted other expected items than the commas give; a judge that omits missed items would find everything)."""
        facts = [outcome.facts for outcome in outcomes]
        more = {name: 100.0 * mean([float(each[name]) for each in facts]) for name in ("judge_unread", "items_differ")}
        return {**figures(facts), **more}


class Exact:
    """Scorer `deepsearchqa-exact`: compares texts (rollouts/search/matching.py). Offline, deterministic, ignores synonyms."""

    version = EXACT_VERSION

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """Return outcomes from comparing sets of normalised items; of several samples the mean."""
        given = [[answered(text) for text in drawn] for drawn in answers]
        return _outcomes(given, lambda place, answer: compare(answer, items[place].answer, _type(items[place])))

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        return figures([outcome.facts for outcome in outcomes])


def figures(facts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the benchmark's figures: means over items, in percent except `mean_steps`. `fully_correct`,
    `correct_with_excessive` and `fully_incorrect` are disjoint; the rest is partially correct."""
    found = {name: 100.0 * mean([float(each[name]) for each in facts]) for name in (*OF_COUNTS, "answered")}
    return {**found, "mean_steps": mean([float(each["steps"]) for each in facts])}


def conversation(template: str, values: Mapping[str, str], reminder: str = "") -> list[dict[str, str]]:
    """Return the judge's prompt as one user turn. Doubled braces in the template become single ones, as in `str.format`. ValueError
    if it has no field for the answer or for the expected items."""
    fields = set(_FIELD.findall(template))
    if not {"response", "correct_answer"} <= fields:
        raise ValueError("a judge's prompt holds {correct_answer} and {response}")
    # In one pass, because an answer may itself hold {correct_answer}.
    text = _FIELD.sub(lambda match: values[match[1]] if match[1] else match[0][0], template)
    return [{"role": "user", "content": text + reminder}]


def _judged(questions: Sequence[Mapping[str, str]], context: Context) -> list[ParsedVerdict | None]:
    """Return each verdict; None for an unreadable one that counts as 0. See `DeepSearchQA.score`."""
    assert context.judge is not None
    official = context.options.get("judge_rule") == OFFICIAL
    limit = int(context.options.get("judge_max_tokens", JUDGE_TOKENS))
    found: dict[int, ParsedVerdict | None] = {}
    why: dict[int, str] = {}
    for reminder in REMINDERS[: 1 if official else ROUNDS]:
        left = [number for number in range(len(questions)) if number not in found]
        if not left:
            break
        asked = [conversation(context.judge_prompt, questions[number], reminder) for number in left]
        verdicts = context.judge.ask(asked, max_tokens=limit)
        for number, verdict in zip(left, verdicts, strict=True):
            try:
                found[number] = _read(verdict, official)
            except Unreadable as error:
                why[number] = str(error)
        context.judge.forget([v for number, v in zip(left, verdicts, strict=True) if found.get(number) is None])
    unread = [number for number in range(len(questions)) if number not in found]
    if len(unread) > UNREAD_SHARE * len(questions):
        raise JudgeFailed(
            f"{len(unread)} of {len(questions)} replies of {context.judge.model} can't be read, the first: {why[unread[0]]}"
        )
    return [found.get(number) for number in range(len(questions))]


def _read(verdict: Verdict, official: bool) -> ParsedVerdict | None:
    if verdict.refused:  # also under the official rule, because a refusal holds no verdict
        raise Unreadable(f"it would not answer: {verdict.refused}")
    if not official:
        if verdict.cut_off:
            raise Unreadable("it is cut off by the limit of tokens")
        return read(verdict.text)
    try:
        return read_official(verdict.text)
    except Unreadable:
        return None


def _values(item: ItemLike, answer: str) -> dict[str, str]:
    names, texts = _FIELDS, (item.question, _type(item), item.answer, answer)
    clean = {name: text.encode("utf-8", "replace").decode() for name, text in zip(names, texts, strict=True)}
    # The hash depends on the answer, so no answer can hold the line that ends it.
    mark = hashlib.sha256("\0".join(clean.values()).encode()).hexdigest()[:16]
    return {**clean, "mark": mark}


def _type(item: ItemLike) -> str:
    return SET if item.data.get("answer_type") == SET else SINGLE


def _expected(item: ItemLike) -> int:
    return compare("", item.answer, _type(item)).missed


def _outcomes(given: Sequence[Sequence[tuple[str, int]]], rate: Callable[[int, str], Counts]) -> list[Outcome]:
    outcomes = []
    for place, drawn in enumerate(given):
        counts = [rate(place, text) for text, _ in drawn]
        facts: dict[str, Fact] = {name: mean([getattr(each, name) for each in counts]) for name in OF_COUNTS}
        facts["answered"] = mean([bool(text) for text, _ in drawn])
        facts["steps"] = mean([steps for _, steps in drawn])
        outcomes.append(Outcome(float(facts["fully_correct"]), facts))
    return outcomes
