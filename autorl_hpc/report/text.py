"""Text that others wrote (agents above all), made harmless for a terminal, HTML, Markdown and CSV."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

MAX_CHARS = 500
"""A note or a reason longer than this is cut: a report is read by people."""

SHORT_CHARS = 40
"""Words of states, numbers and names: a table has the same ones over and over."""

_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC: titles, links, clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c]*(?:\x1b\\|\x9c)?"  # DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]?"
)
_MARKUP = re.compile(r"([\\`*_\[\]|~])|^([-+#=]|\d+(?=[.)]))")
"""Markup anywhere, and what makes a heading or a list at the start."""

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "|", "%")
"""What a spreadsheet may take for a formula or a command at the start of a cell."""


def clean(text: str | None, limit: int = MAX_CHARS) -> str | None:
    """One line without terminal escapes, control, direction and zero-width characters; None stays None."""
    if text is None:
        return None
    if text.isascii() and text.isprintable() and len(text) <= limit:
        return " ".join(text.split())
    plain = _ESCAPE.sub("", text[: 20 * limit])
    kept = []
    for char in plain:
        category = unicodedata.category(char)
        if category in ("Cc", "Zl", "Zp"):
            kept.append(" ")
        elif category not in ("Cf", "Cs", "Co", "Cn"):
            kept.append(char)
    line = " ".join("".join(kept).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def clean_code(text: str, limit: int = MAX_CHARS) -> str:
    """As `clean`, for a line of code or of a log: its spaces stay, tabs are four."""
    if text.isascii() and text.isprintable() and len(text) <= limit:
        return text.rstrip()
    kept = []
    for char in _ESCAPE.sub("", text[: 20 * limit]).expandtabs(4):
        category = unicodedata.category(char)
        if category in ("Cc", "Zl", "Zp"):
            kept.append(" ")
        elif category not in ("Cf", "Cs", "Co", "Cn"):
            kept.append(char)
    line = "".join(kept).rstrip()
    return line if len(line) <= limit else line[: limit - 1] + "…"


def html(text: object) -> str:
    """`text` inside an HTML element or a quoted attribute, escaped as the templates escape it."""
    told = str(text)
    return _short_html(told) if len(told) <= SHORT_CHARS else _html(told)


def _html(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("'", "&#39;").replace('"', "&#34;")


_short_html = lru_cache(maxsize=10_000)(_html)


def markdown(text: object) -> str:
    """`text` as Markdown that shows it literally: no markup, no HTML, no link that makes itself."""
    told = "" if text is None else str(text)
    return _short_markdown(told) if len(told) <= SHORT_CHARS else _markdown(told)


def _markdown(text: str) -> str:
    shown = clean(text) or ""
    shown = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    shown = _MARKUP.sub(_escaped, shown)
    return shown.replace("://", "&#58;//").replace("www.", "www&#46;").replace("@", "&#64;")


_short_markdown = lru_cache(maxsize=10_000)(_markdown)


def _escaped(match: re.Match[str]) -> str:
    number = (match[2] or "").isdigit()
    return f"{match[2]}&#8203;" if number else f"\\{match[0]}"


def csv_cell(value: object) -> object:
    """A number as it is, text so that no spreadsheet takes it for a formula (OWASP's advice: a quote before it)."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return value
    shown = clean(str(value)) or ""
    return "'" + shown if shown.startswith(_FORMULA_STARTS) else shown
