"""Numbers as people read them: points with one decimal, units shown, a true minus sign, a dash for what is not known."""

from __future__ import annotations

UNKNOWN = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def points(value: float | None) -> str:
    """`43.2`."""
    return UNKNOWN if value is None else f"{_no_negative_zero(value):.1f}".replace("-", MINUS)


def signed(value: float | None) -> str:
    """`+3.2`, `0.0`, and a true minus sign before what is negative."""
    if value is None:
        return UNKNOWN
    rounded = _no_negative_zero(value)
    return "0.0" if rounded == 0 else f"{rounded:+.1f}".replace("-", MINUS)


def between(low: float | None, high: float | None) -> str:
    """`[40.1, 46.3]`, empty where there is no interval."""
    return "" if low is None or high is None else f"[{points(low)}, {points(high)}]"


def signed_between(low: float | None, high: float | None) -> str:
    """`[+1.1, +5.3]`."""
    return "" if low is None or high is None else f"[{signed(low)}, {signed(high)}]"


def over_between(kind: str, low: float | None, high: float | None) -> str:
    """The interval of a mean over runs, with what it is where it is none over runs, or why equal runs have none."""
    if kind == "no spread seen":
        return f"({kind})"
    word = {"range of two runs": "range of two", "items of one run, not over runs": "items of one run"}.get(kind, "")
    between = signed_between(low, high)
    return f"{between} {word}".strip() if between else ""


def share_between(low: float | None, high: float | None) -> str:
    """`[0.41, 0.89]`, empty where there is no interval."""
    return "" if low is None or high is None else f"[{low:.2f}, {high:.2f}]"


def p_value(value: float | None) -> str:
    """`0.012`, `<0.001`."""
    if value is None:
        return UNKNOWN
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def duration(seconds: float) -> str:
    """`45 s`, `12.5 min`, `20 min`, `3.2 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    value, unit = (seconds / 60, "min") if seconds < 7200 else (seconds / 3600, "h")
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def delta(value: float | None) -> str:
    """`2.4e-06`: relative deltas of honest training differ by orders of magnitude."""
    return UNKNOWN if value is None else "0" if value == 0 else f"{value:.1e}"


def percent(share: float | None) -> str:
    """`71 %`."""
    return UNKNOWN if share is None else f"{100 * share:.0f} %"


def size(count: float) -> str:
    """`512 B`, `3.4 MB`, `1.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def amount(kind: str, value: float) -> str:
    """A cost: `count` of tokens as `3.4 M`, `money` as `0.52`, `hours` as `3.4 h`."""
    if kind == "count":
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if value >= size:
                return f"{value / size:.1f} {unit}"
        return f"{value:.0f}"
    return f"{value:.2f}" if kind == "money" else f"{value:.1f} h"


def gpus(count: str | None, model: str | None) -> str:
    """`4 x H100` with a sign of multiplication; `no GPU`; `GPUs unknown`: nothing measured them."""
    if count is None:
        return "GPUs unknown"
    return "no GPU" if count == "0" else f"{count} \N{MULTIPLICATION SIGN} {model or 'GPU of unknown model'}"


def short_hash(value: str | None) -> str:
    """The first eight digits: enough to tell two apart by eye."""
    return UNKNOWN if value is None else value[:8]


def _no_negative_zero(value: float) -> float:
    return round(value, 1) + 0.0
