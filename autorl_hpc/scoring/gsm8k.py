"""Scorers of GSM8K: `gsm8k` (the default, reads answers as a person would), `gsm8k-marked`, `gsm8k-opencompass`. Pure
functions, standard library only. No function raises on a model's text, evaluates it, or takes more than linear time."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from fractions import Fraction
from itertools import islice
from typing import Final, NamedTuple

from autorl_hpc.rollouts.characters import plain_characters
from autorl_hpc.scoring.outcome import ByItem


def without_closed_thinking(text: str) -> str:
    """Return the same as `re.sub("<think>.*?</think>", "", text)`, which is quadratic if many are opened and none closed."""
    kept, start = [], 0
    while (opened := text.find("<think>", start)) >= 0:
        closed = text.find("</think>", opened)
        if closed < 0:
            break
        kept.append(text[start:opened])
        start = closed + len("</think>")
    return "".join(kept) + text[start:]


VERSION: Final = "4"  # Version of the scorer `gsm8k`; any change that can change a verdict needs a new version
MAX_TEXT_CHARS: Final = 1 << 20  # Longer texts count as no answer; a recipe of 8,192 tokens stays below a tenth of it
MAX_NUMBER_CHARS: Final = 64
"""Longer numbers are unreadable. Gold answers have less than a quarter of these digits, and int() of long ones is slow."""
MAX_EXPONENT: Final = 30  # `1e3` is 1000. A larger exponent is unreadable, so that no power of ten fills the memory.
FIELD_CHARS: Final = 240  # Characters of a marked answer that are read after its mark
TAIL_CHARS: Final = 4000  # Range around the last digit for an unmarked answer and a comment in parentheses after it
MAX_MARKS: Final = 50  # Marks of one kind to read: the first ones of `####`, the last ones of the others

# In this module a NUL precedes a fraction that was one character or a LaTeX command, so that `3½` is not 31/2 and `-½` keeps
# its sign. A NUL in the model's text becomes a space first.
_FRACTION_MARK: Final = "\x00"
_CHARS: Final = str.maketrans(
    {**dict.fromkeys("\x00_\u2014", " "), **dict.fromkeys("\u20ac\xa3\xa5\u20a9\u20b9\u20bd\u20bf\u20ba\u20a6", "$")}
)
"""In addition to `plain_characters`; a long dash that is no sign is punctuation."""
_FRACTION = re.compile(r"[\xbc-\xbe\u2150-\u215e\u2189]")

# No pattern has nested or overlapping unbounded repeats: at each start it does bounded work or consumes what it scanned.
_CALCULATION = re.compile(r"<<[^<>]{0,200}>>")  # GSM8K's calculator notes: $<<9*2=18>>18
_JOINED = re.compile(r"(?<=\d)[_~](?=\d{3}(?!\d))")  # `1_000`, and LaTeX's `1~000`
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s?(?:\{\s?(\d{1,20})\s?\}\s?\{\s?(\d{1,20})\s?\}|(\d)(\d))")
_LATEX: Final = (
    (re.compile(r"\\(?:text(?:bf|rm|it)?|math(?:bf|rm)|mbox)\s?\{([^{}]{0,40})\}"), r" \1 "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\[,;: ]"), "\xa0"),
    (re.compile(r"\\([$%#&])"), r"\1"),
    (re.compile(r"\\(?:[()\[\]]|(?:text(?:bf|rm|it)?|math(?:bf|rm)|mbox|left|right|displaystyle)\b)"), " "),
    (re.compile(r"\\(?:times|cdot)\b"), "*"),
    (re.compile(r"\\(?:approx|equiv)\b"), "="),
)

# `_CHARS` has made spaces of underscores.
_NEXT_TURN = re.compile(
    r"<\|[\w ]{1,30}\|>|<(?:start|end) of turn>|\[/?INST\]|</?(?:s|eos|user|human|assistant|system)>", re.IGNORECASE
)
_NEXT_QUESTION = re.compile(
    r"Question:|^[ \t#*>\"'\u201c(\[-]*(?i:(?:\d{1,2}[.)][ \t])?(?:(?:next|new|another|follow-?up|math|word)[ \t])?"
    r"(?:Qn?|Question|Query|Problem|Exercise|Prompt|Instruction|Human|User|Assistant|System)"
    r"[ \t]?[.#]?[ \t]?(?:\d{1,3}[ \t]?(?:of[ \t]\d{1,3})?[.)]?)?[\])*]*:(?![ \t*$]{0,20}\d[^?\n]{0,200}$)"  # `Q2: 400 sold` is a number
    r"|(?:Q|Question|Problem|Exercise)[ \t]?#?\d{1,3}[.)][ \t]*(?=[^\W\d])"
    r"|[\[<]?(?:human|user|assistant)[\]>]?[ \t]*$|(?:human|user)>)"
    r"|^[ \t]*[#*]{1,6}[ \t]*(?i:Q|Question|Problem|Exercise)[ \t]?#?\d{0,3}[ \t]*\**[ \t]*$|^(?i:Question)(?:[ \t]\d{1,3})?[ \t]*$"
    r"|(?<=[\d.!?)] )(?:Q\d{0,2}|Human|User):(?![ \t*$]{0,20}\d[^?\n]{0,200}$)",
    re.MULTILINE,
)
_ANSWERED = re.compile(
    r"####[^\n\d]{0,20}\d|\\boxed|\banswers?\b[^\n.:=\d]{0,40}(?:\b(?:is|are|was|be)\b|[:=])[^\w\n]{0,10}\d",
    re.IGNORECASE,
)
_TOKEN = r"(?:(?<![\w.])\.)?\d+(?:[,.'\xa0]\d+)*"
_NUMBER = re.compile(
    rf"""
    (?:(?P<sign>(?<![\w)\]}}%.-])-))?(?:\$[ ]?)?\x00?(?P<first>{_TOKEN})
    (?:
        (?:[ \xa0]{{0,3}}\x00|[ \xa0]{{1,3}}(?:and[ ])?)(?P<top>\d{{1,20}})/(?P<bottom>\d{{1,20}})(?!/?\d)
      | [ ]?/[ ]?(?P<under>{_TOKEN})(?P<more>(?:/\d+)*)
      | [eE](?P<exponent>[+-]?\d{{1,3}})(?!\w)
    )?""",
    re.VERBOSE,
)
_PLAIN_NUMBER = re.compile(r"\d*(?:\.\d+)?")
_GROUPED = re.compile(r"\d{1,3}([,'\xa0])\d{3}(?:\1\d{3})*(?:\.\d+)?")
_GROUPED_INDIAN = re.compile(r"\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?")
_DECIMAL_COMMA = re.compile(r"\d{1,3}([.'\xa0])\d{3}(?:\1\d{3})*,\d+")
_GROUPED_BY_POINTS = re.compile(r"\d{1,3}(?:\.\d{3}){2,}")
_HASHES = re.compile(r"(?<!#)####(?!#)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s?\{")
_ANSWER = re.compile(r"(?<!to )\banswers?\b", re.IGNORECASE)
_LINK = re.compile(r"[^\n.:=]{0,40}?(?P<link>\b(?:is|are|was|be|equals)\b|[:=])", re.IGNORECASE)
# Allowed between a mark and its number: no letters, digits or signs.
_NOISE = re.compile(r"(?:[^\w.\\-]|\.(?!\d)|-(?![.$\x00\d]))*(?:(?:US|USD|INR|EUR|GBP|Rs\.?)(?=[\s$\d])[\s$]*)?")
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
_HEADING = re.compile(r"[.):]\**[ \t]+\**[^\W\d]")  # after the number: `#### 1. Count the eggs`
_NAMED = re.compile(r"[^\W\d]{1,20}\s?=")  # `#### x = 18`
_WORD = re.compile(r"[^\W\d]+")
_HEDGE = re.compile(
    r"\W*(?:[^\W\d]{1,20}\W+)?(?P<link>or|and|to|vs|versus)\W+"
    r"(?:(?:maybe|perhaps|possibly|even|about|either|else|the|it|is|could|be)\W+){0,4}",
    re.IGNORECASE,
)
_MAX_HEDGE_CHARS: Final = 60
_OPERATION = re.compile(r"[-+*/\xd7\xf7^]")
_ENDS_WITH_COMMENT = re.compile(r"\)[\s.!?*$\"']{0,20}\Z")
_OR_ELSE = re.compile(r"\(\s?or\b", re.IGNORECASE)
_OPERATORS: Final = tuple("=*+-/\xd7\xf7^")


class _Found(NamedTuple):
    """An answer was found; `value` is None if it is unreadable or names two different numbers."""

    value: Fraction | None


def read_answer(text: str) -> Fraction | None:
    """Return the number that a solution gives as its answer, or None (scorer `gsm8k`, version 4).

    Thinking is removed, and what stands behind an unclosed `<think>`. Characters become plain (`plain_characters`), LaTeX numbers too.
    The rest is cut where the model adds another turn or question (`<|user|>`, `Question:`, or `Q:`, `Problem:`, `User:` and the
    like at the beginning of a line). The first of these that exists decides:

    1. the first `#### N`, as in the official extraction (openai/grade-school-math, grade_school_math/dataset.py), but also with
       `$`, bold, units, a period, an equation;
    2. the last `\\boxed{N}`;
    3. the last "answer is N" or "answer: N" ("Answer:" before further reasoning doesn't count);
    4. a single `#### 3. Some words`; several of them are headings of an outline;
    5. the last number, without a comment in parentheses at the end; behind a mark without an answer ("the answer is unknown").

    In a marked answer the first number counts if no words precede it, otherwise the last; in an equation, the right side. Two
    different numbers side by side, or joined by "or", "and", "to", are no answer. A unit never scales (`5 million` is 5); `1,5`,
    `1.2.3`, `1/0` and dates are unreadable. Never raises on a `str`; takes linear time.
    """
    if len(text) > MAX_TEXT_CHARS:
        return None
    text = _cut_run_on(_plain(without_thinking(text)))
    last_digit = _last_digit(text)
    if last_digit < 0:
        return None
    unread_end = 0

    headings: list[_Found] = []
    for mark in islice(_HASHES.finditer(text), MAX_MARKS):
        found, is_heading = _read_hashes(text, mark.end())
        if found and not is_heading:
            return found.value
        if found:
            headings.append(found)
        elif not _WORD.search(text, mark.end(), mark.end() + FIELD_CHARS):
            unread_end = max(unread_end, mark.end())

    boxes = deque(_BOX.finditer(text), maxlen=2)
    if boxes:
        found = _read_boxes(text, list(boxes))
        if found:
            return found.value
        unread_end = max(unread_end, boxes[-1].end())

    for word in reversed(deque(_ANSWER.finditer(text), maxlen=MAX_MARKS)):
        link = _LINK.match(text, word.end())
        if not link:
            continue
        field, end = _field(text, link.end())
        found = _read_field(field)
        if not found:
            unread_end = max(unread_end, link.end())
        elif link["link"].isalpha() or last_digit < end or _is_short_answer(field):
            return found.value

    return headings[0].value if len(headings) == 1 else _read_last_number(text[unread_end:])


def read_gold(answer: str) -> Fraction:
    """Return the gold answer from a row's `answer` (after its last `#### `) or from a bare number. ValueError if it is not a number:
    the task's data are at fault, never the model."""
    number = answer.rsplit("#### ", 1)[-1].strip().replace(",", "")
    if not re.fullmatch(r"-?[0-9]+(?:\.[0-9]+)?", number) or len(number) > MAX_NUMBER_CHARS:
        raise ValueError(f"gold answer is not a number: {number[:80]!r}; check the task's data")
    return Fraction(number)


def score_item(text: str, gold: str) -> bool:
    """Return whether a solution's answer equals the gold answer exactly; `gold` as for `read_gold`."""
    return read_answer(text) == read_gold(gold)


GSM8K: Final = ByItem(VERSION, lambda text, answer: float(score_item(text, answer)))


def without_thinking(text: str) -> str:
    """Return the text without thinking, without what stands before a lone `</think>`, and without what an open `<think>` begins."""
    text = without_closed_thinking(text)
    return text.rsplit("</think>", 1)[-1].split("<think>", 1)[0]


def _cut_run_on(text: str) -> str:
    """Return the text before a turn or question that the model added; one before any number is only a repetition. A question
    before the first marked answer is part of the reasoning if that answer is `#### N`."""
    text = text.strip()
    number = re.search(r"\d", text)
    if not number:
        return text
    turn = _NEXT_TURN.search(text, number.end())
    text = text[: turn.start()] if turn else text
    added, answer = _NEXT_QUESTION.search(text, number.end()), _ANSWERED.search(text)
    if added and answer and added.start() < answer.start() and answer[0].startswith("#"):
        added = _NEXT_QUESTION.search(text, answer.end())
    return text[: added.start()] if added else text


def _plain(text: str) -> str:
    text = _CALCULATION.sub("", text)
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    text = plain_characters(_JOINED.sub("\xa0", text)).translate(_CHARS)
    text = _FRACTION.sub(
        lambda char: _FRACTION_MARK + unicodedata.normalize("NFKC", char[0]).replace("\u2044", "/"), text
    )
    return _LATEX_FRACTION.sub(lambda part: f"{_FRACTION_MARK}{part[1] or part[3]}/{part[2] or part[4]}", text)


def _last_digit(text: str) -> int:
    return max(text.rfind(digit) for digit in "0123456789")


def _magnitude(token: str) -> Fraction | None:
    if len(token) > MAX_NUMBER_CHARS:
        return None
    if _DECIMAL_COMMA.fullmatch(token):
        token = re.sub(r"[.'\xa0]", "", token).replace(",", ".")
    elif _GROUPED_BY_POINTS.fullmatch(token):
        token = token.replace(".", "")
    elif _GROUPED.fullmatch(token) or _GROUPED_INDIAN.fullmatch(token):
        token = re.sub(r"[,'\xa0]", "", token)
    elif not _PLAIN_NUMBER.fullmatch(token):
        return None
    return Fraction(token)


def _value(number: re.Match[str]) -> Fraction | None:
    value = _magnitude(number["first"])
    if value is None:
        return None
    if number["top"]:
        top, bottom = int(number["top"]), int(number["bottom"])
        if value.denominator != 1 or top >= bottom:
            return None
        value += Fraction(top, bottom)
    elif number["under"]:
        under = _magnitude(number["under"])
        if not under or number["more"]:
            return None
        value /= under
    elif number["exponent"]:
        exponent = int(number["exponent"])
        if abs(exponent) > MAX_EXPONENT:
            return None
        value *= Fraction(10) ** exponent
    return -value if number["sign"] else value


def _field(text: str, start: int) -> tuple[str, int]:
    """Return the marked answer, from `start` to the end of the line or sentence, and its end position."""
    noise = _NOISE.match(text, start, start + FIELD_CHARS)
    begin = noise.end() if noise else start
    number = _NUMBER.match(text, begin, begin + FIELD_CHARS)
    stop = _SENTENCE_END.search(text, number.end() if number else begin, begin + FIELD_CHARS)
    if stop:
        return text[begin : stop.start()], stop.start()
    field = text[begin : begin + FIELD_CHARS]
    if len(text) > begin + FIELD_CHARS:
        field = field.rsplit(None, 1)[0] if field.strip() else ""  # never half a number
    return field, begin + len(field)


def _read_hashes(text: str, start: int) -> tuple[_Found | None, bool]:
    """Return the answer after `####`, and whether it may be the heading of a numbered section."""
    field, end = _field(text, start)
    number = _NUMBER.match(field)
    if number:
        begin = end - len(field)
        return _read_field(field), bool(_HEADING.match(text, begin + number.end(), end + FIELD_CHARS))
    return (_read_field(field), False) if _NAMED.match(field) or _BOX.match(field) else (None, False)


def _read_boxes(text: str, boxes: list[re.Match[str]]) -> _Found | None:
    """Return the answer in the last box; unreadable if "or" joins it to a different one in the box before."""
    last, end = _box_content(text, boxes[-1].end())
    found = _read_field(last)
    if found and len(boxes) == 2:
        other, end = _box_content(text, boxes[0].end())
        if _hedge(text, end, boxes[1].start()):
            return found if _read_field(other) == found else _Found(None)
    return found


def _box_content(text: str, start: int) -> tuple[str, int]:
    depth = 1
    for position in range(start, min(len(text), start + FIELD_CHARS)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return text[start:position], position + 1
    return _field(text, start)  # cut off by the token limit


def _is_short_answer(field: str) -> bool:
    """Return whether the field is a number with at most two words after it; "Answer: 16 - 3 = 13 eggs. Then ..." is not."""
    field = _without_comments(field)
    number = _NUMBER.match(field)
    rest = field[number.end() :] if number else "="
    return not re.search(r"[\d=+*]", rest) and len(_WORD.findall(rest)) <= 2


def _read_field(field: str) -> _Found | None:
    """Return the single number of a marked answer, at most `FIELD_CHARS` long."""
    field = _without_comments(field)
    if "=" not in field:
        return _read_part(field)
    left, right = _read_part(field.split("=", 1)[0]), _read_part(field.rsplit("=", 1)[1])
    if right and right.value is not None:
        return right
    return left or right


def _read_part(part: str) -> _Found | None:
    numbers = list(_NUMBER.finditer(part))
    if not numbers:
        return None
    words_first = _WORD.search(part, 0, numbers[0].start())
    pair = numbers[-2:][::-1] if words_first else numbers[:2]
    value = _value(pair[0])
    if len(pair) == 2:
        first, second = sorted(pair, key=lambda number: number.start())
        start, end = first.end(), second.start()
        joined = not _WORD.search(part, start, end) or _hedge(part, start, end)
        if joined and (value != _value(pair[1]) or _OPERATION.search(part, start, end)):
            return _Found(None)
    return _Found(value)


def _hedge(text: str, start: int, end: int) -> str:
    """Return the word that joins two answers between `start` and `end`; "" if they are not alternatives."""
    hedge = _HEDGE.fullmatch(text, start, end) if 0 < end - start <= _MAX_HEDGE_CHARS else None
    return hedge["link"].lower() if hedge else ""


def _without_comments(text: str) -> str:
    """Remove parts in parentheses if a digit is left; factors like `2 * (3 + 4)` stay."""
    kept, start, depth, opened = "", 0, 0, 0
    for parenthesis in re.finditer(r"[()]|$", text):
        if parenthesis.group() == "(":
            opened = opened if depth else parenthesis.start()
            depth += 1
        elif depth:
            depth = depth - 1 if parenthesis.group() else 0  # the end closes all
            if not depth and _is_comment(text, opened):
                kept += text[start:opened]
                start = parenthesis.end()
    kept += text[start:]
    return kept if _last_digit(kept) >= 0 else text


def _without_last_comment(text: str) -> str:
    """Remove the part in parentheses at the end of the text, if a digit is left."""
    end = _ENDS_WITH_COMMENT.search(text)
    depth = 0
    for parenthesis in reversed(list(re.finditer(r"[()]", text[: end.start() + 1]))) if end else ():
        depth += 1 if parenthesis.group() == ")" else -1
        if not depth:
            kept = text[: parenthesis.start()]
            return kept if _is_comment(text, len(kept)) and _last_digit(kept) >= 0 else text
    return text


def _is_comment(text: str, opened: int) -> bool:
    """Return whether the parenthesis at `opened` is an aside and not a factor, argument or second answer."""
    before = text[max(0, opened - 20) : opened].rstrip()
    factor = before.endswith(_OPERATORS) and not before.endswith("**")  # `**` is bold
    return not factor and not _OR_ELSE.match(text, opened)


def _read_last_number(text: str) -> Fraction | None:
    """Return the last number of a text without marks; "5 or 7" gives None."""
    last = _last_digit(text)
    start = max(0, last - TAIL_CHARS)
    tail = _without_last_comment(text[start : last + TAIL_CHARS])
    numbers = list(_NUMBER.finditer(tail))[-2:]
    if not numbers or (start and not numbers[-1].start()):
        return None  # a number that begins before the tail is too long to be read
    value = _value(numbers[-1])
    hedge = _hedge(tail, numbers[0].end(), numbers[1].start()) if len(numbers) == 2 else ""
    return None if hedge == "or" and value != _value(numbers[0]) else value


# --- scorer `gsm8k-marked`: the number after the first `#### ` and nothing else
# Source: openai/grade-school-math, grade_school_math/dataset.py, `ANS_RE = #### (\\-?[0-9\\.\\,]+)` and `extract_answer`, which
# takes the first match, drops commas and compares strings. Here values are compared, so that `16.0` is 16.

MARKED_VERSION: Final = "4"
_MARKED = re.compile(r"####[ \t]*(-?[0-9.,\xa0]+)")


def read_marked(text: str) -> Fraction | None:
    """Return the number after the first mark that has one; None if there is none or it is unreadable."""
    found = _MARKED.search(plain_characters(text))
    if found is None or len(found[1]) > MAX_NUMBER_CHARS:
        return None
    try:
        return Fraction(re.sub("[,\xa0]", "", found[1]).rstrip("."))
    except (ValueError, ZeroDivisionError):
        return None


def score_marked(text: str, gold: str) -> bool:
    """Return whether the marked number equals the gold answer."""
    return read_marked(text) == read_gold(gold)


GSM8K_MARKED: Final = ByItem(MARKED_VERSION, lambda text, answer: float(score_marked(text, answer)))


# --- scorer `gsm8k-opencompass`: OpenCompass's extraction, bit for bit with its faults, to compare with published scores

OPENCOMPASS_VERSION: Final = "a5acc4bb"  # Version of the scorer: the commit of OpenCompass that it reproduces


def opencompass_text(text: str) -> str:
    """Remove thinking as OpenCompass does for every model: `extract-non-reasoning-content` of utils/text_postprocessors.py."""
    if "<think>" not in text and "</think>" in text:
        return text.rsplit("</think>", maxsplit=1)[-1].strip()
    return without_closed_thinking(text).strip()


def opencompass_extract(text: str) -> str:
    """Extract the answer as OpenCompass does, including its faults: the last number before the first `Question:`, else `NULL`
    (`8,000` gives `000`, "10-3" gives `-3`). Source: open-compass/opencompass @ a5acc4bb, datasets/gsm8k.py
    (`gsm8k_postprocess`), utils/text_postprocessors.py."""
    text = opencompass_text(text)
    last = deque(re.finditer(r"\-?\d+\.\d+|\-?\d+", text.split("Question:")[0]), maxlen=1)
    return last[0].group() if last else "NULL"


def opencompass_correct(pred: str, gold_answer: str) -> bool:
    """Return whether OpenCompass counts an extracted answer as right: equal strings, or floats within 1e-6 of the integer;
    ValueError without a `#### ` in the row's `answer` (`gsm8k_dataset_postprocess`, `Gsm8kEvaluator.is_equal`)."""
    parts = gold_answer.split("#### ")
    if len(parts) < 2:
        raise ValueError(f"gold answer has no '#### ': {gold_answer[-80:]!r}; check the task's data")
    gold = parts[1].replace(",", "")
    try:
        return pred == gold or abs(float(pred) - int(gold)) < 1e-6
    except (ValueError, OverflowError):
        return False


GSM8K_OPENCOMPASS: Final = ByItem(
    OPENCOMPASS_VERSION, lambda text, answer: float(opencompass_correct(opencompass_extract(text), answer))
)
