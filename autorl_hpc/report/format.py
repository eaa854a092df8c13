"""Format numbers for readers (points, durations, sizes), clean untrusted text for terminal, HTML, Markdown and CSV."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Any, TypeVar, cast

from autorl_hpc.records.base import Strict
from autorl_hpc.scoring.stats import ALPHA

UNKNOWN = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def points(value: float | None) -> str:
    """Format a score: `43.2`."""
    return UNKNOWN if value is None else f"{_no_negative_zero(value):.1f}".replace("-", MINUS)


def signed(value: float | None) -> str:
    """Format a difference: `+3.2`, `0.0`, a true minus sign for negative values."""
    if value is None:
        return UNKNOWN
    rounded = _no_negative_zero(value)
    return "0.0" if rounded == 0 else f"{rounded:+.1f}".replace("-", MINUS)


def between(low: float | None, high: float | None) -> str:
    """Format an interval: `[40.1, 46.3]`; empty if there is none."""
    return "" if low is None or high is None else f"[{points(low)}, {points(high)}]"


def signed_between(low: float | None, high: float | None) -> str:
    """Format an interval of a difference: `[+1.1, +5.3]`."""
    return "" if low is None or high is None else f"[{signed(low)}, {signed(high)}]"


def over_between(kind: str, low: float | None, high: float | None) -> str:
    """Format the interval of a mean over runs; names its kind if it is not over runs, or why equal runs have none."""
    if kind == "no spread seen":
        return f"({kind})"
    word = {"range of two runs": "range of two", "items of one run, not over runs": "items of one run"}.get(kind, "")
    between = signed_between(low, high)
    return f"{between} {word}".strip() if between else ""


def p_value(value: float | None) -> str:
    """Format a p value: `0.012`, `<0.001`."""
    if value is None:
        return UNKNOWN
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def duration(seconds: float) -> str:
    """Format seconds: `45 s`, `12.5 min`, `20 min`, `3.2 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    value, unit = (seconds / 60, "min") if seconds < 7200 else (seconds / 3600, "h")
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def delta(value: float | None) -> str:
    """Format a relative weight change: `2.4e-06`, because changes by honest training differ by orders of magnitude."""
    return UNKNOWN if value is None else "0" if value == 0 else f"{value:.1e}"


def figure(value: float | None) -> str:
    """Format a task's further figure: whole numbers without decimals, others with three."""
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if value == round(value) else f"{value:.3f}"


def percent(share: float | None) -> str:
    """Format a share: `71 %`."""
    return UNKNOWN if share is None else f"{100 * share:.0f} %"


def size(count: float) -> str:
    """Format bytes: `512 B`, `3.4 MB`, `1.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def amount(kind: str, value: float) -> str:
    """Format a cost by kind: `count` (tokens) as `3.4 M`, `money` as `0.52`, `hours` as `3.4 h`."""
    if kind == "count":
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if value >= size:
                return f"{value / size:.1f} {unit}"
        return f"{value:.0f}"
    return f"{value:.2f}" if kind == "money" else f"{value:.1f} h"


EXACT = "the test is exact for the few items that changed, the interval an approximation"


def gpus(count: str | None, model: str | None) -> str:
    """Format GPUs: `4 x H100` with a multiplication sign; `no GPU`; `GPUs unknown` if not measured."""
    if count is None:
        return "GPUs unknown"
    return "no GPU" if count == "0" else f"{count} \N{MULTIPLICATION SIGN} {model or 'GPU of unknown model'}"


def decides(p: float | None, low: float | None, high: float | None) -> str:
    """Return that the test decides, and why, where the interval contradicts it; empty where they agree or one is missing."""
    if p is None or low is None or high is None or (p < ALPHA) is (low > 0 or high < 0):
        return ""
    return f"p decides: {EXACT}"


def short_hash(value: str | None) -> str:
    """Return the first eight digits of a hash."""
    return UNKNOWN if value is None else value[:8]


def _no_negative_zero(value: float) -> float:
    return round(value, 1) + 0.0


# --- text from others (above all agents), cleaned for terminal, HTML, Markdown and CSV

MAX_CHARS = 500  # longer notes and reasons are cut
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC: titles, links, clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c]*(?:\x1b\\|\x9c)?"  # DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]?"
)
_MARKUP = re.compile(r"([\\`*_\[\]|~])|^([-+#=]|\d+(?=[.)]))")
"""Markup anywhere, and what starts a heading or a list."""

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "|", "%")
"""Starts of a cell that a spreadsheet may take for a formula or a command."""


def clean(text: str | None, limit: int = MAX_CHARS) -> str | None:
    """Return one line without terminal escapes, control, direction and zero-width characters; None stays None."""
    if text is None:
        return None
    plain = text.isascii() and text.isprintable() and len(text) <= limit
    return _cut(" ".join((text if plain else _visible(text[: 20 * limit])).split()), limit)


def clean_code(text: str, limit: int = MAX_CHARS) -> str:
    """Clean a line of code or of a log as `clean` does, but keep its spaces; a tab becomes four."""
    plain = text.isascii() and text.isprintable() and len(text) <= limit
    return _cut((text if plain else _visible(text[: 20 * limit], tab=4)).rstrip(), limit)


def _visible(text: str, tab: int = 1) -> str:
    kept = []
    for char in _ESCAPE.sub("", text).expandtabs(tab):
        category = unicodedata.category(char)
        if category in ("Cc", "Zl", "Zp"):
            kept.append(" ")
        elif category not in ("Cf", "Cs", "Co", "Cn"):
            kept.append(char)
    return "".join(kept)


def _cut(line: str, limit: int) -> str:
    return line if len(line) <= limit else line[: limit - 1] + "…"


def html(text: object) -> str:
    """Escape `text` for an HTML element or a quoted attribute, as the templates do."""
    from markupsafe import escape

    return str(escape(str(text)))


def markdown(text: object) -> str:
    """Escape `text` so that Markdown shows it literally: no markup, no HTML, no automatic link."""
    shown = clean("" if text is None else str(text)) or ""
    shown = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    shown = _MARKUP.sub(_escaped, shown)
    return shown.replace("://", "&#58;//").replace("www.", "www&#46;").replace("@", "&#64;")


def _escaped(match: re.Match[str]) -> str:
    number = (match[2] or "").isdigit()
    return f"{match[2]}&#8203;" if number else f"\\{match[0]}"


def csv_cell(value: object) -> object:
    """Return numbers unchanged, and text with a quote before anything that looks like a formula (OWASP's advice)."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return value
    shown = clean(str(value)) or ""
    return "'" + shown if shown.startswith(_FORMULA_STARTS) else shown


# --- copies of records in little memory
# A merged report holds a hundred records per run. pydantic stores the set of assigned fields with each: 2 of the 3 kB of an
# iteration. The report writes all fields, so these copies share one such set.

StrictT = TypeVar("StrictT", bound=Strict)


def lean(record: StrictT, **changes: Any) -> StrictT:
    """Copy a record with other values, not validated (as `model_copy`); all fields count as set."""
    model = type(record)
    return cast(StrictT, model.model_construct(_all_fields(model), **{**record.__dict__, **changes}))


@lru_cache(maxsize=64)
def _all_fields(model: type[Strict]) -> set[str]:
    return set(model.model_fields)
