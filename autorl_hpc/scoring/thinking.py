"""Taking a model's thinking out of its answer."""

from __future__ import annotations


def without_closed_thinking(text: str) -> str:
    """As `re.sub("<think>.*?</think>", "", text)`, which is quadratic if many are opened and none closed."""
    kept, start = [], 0
    while (opened := text.find("<think>", start)) >= 0:
        closed = text.find("</think>", opened)
        if closed < 0:
            break
        kept.append(text[start:opened])
        start = closed + len("</think>")
    return "".join(kept) + text[start:]
