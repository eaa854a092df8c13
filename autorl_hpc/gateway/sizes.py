"""How many tokens a request's input is, by its length: an estimate, and what it can't be more than."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

BYTES_PER_TOKEN: Final = 4.0
"""Of English and code. How far the driver's own figures are from it is learned from its answers. A token is never less than a byte."""

TOKENS_OF_IMAGE: Final = 1500
"""What providers take for a large image."""

MOST_TOKENS_OF_IMAGE: Final = 16_000
MOST_TOKENS_OF_FILE: Final = 300_000
"""A document of a hundred pages, as text and images."""

MOST_INPUT_TOKENS: Final = 2**21
"""No model's window is longer."""

_BASE64: Final = re.compile(r"[A-Za-z0-9+/_\r\n-]*={0,2}\Z")
_MEDIA: Final = frozenset(("image_url", "video_url", "audio_url", "file_data"))
_HOLDERS: Final = frozenset(("source", "inlineData", "inline_data", "input_audio"))
_CARRIERS: Final = _MEDIA | _HOLDERS | {"data"}
"""Names under which, or directly below which, a text may be an image or a file."""

_OWN: Final = frozenset(
    ("input", "arguments", "args", "response", "parameters", "input_schema", "json_schema", "schema", "metadata")
)
"""What stands below is a tool's or the client's own: nothing in it is an image to the driver."""


@dataclass(frozen=True)
class Size:
    """In tokens."""

    tokens: int
    most: int


def size_of(body: dict[str, Any]) -> Size:
    """By the length of all texts; data in base64 count as images and files only where the driver takes them for such. Without
    recursion."""
    bytes_, images, files = 0, 0, 0
    todo: list[tuple[Any, str, bool]] = [
        (body, "", False)
    ]  # a value, the name it stands under, whether it is a tool's own
    while todo:
        each, under, own = todo.pop()
        if isinstance(each, str):
            kind = None if own else _data(each, under)
            if kind == "image":
                images += 1
            elif kind is not None:
                files += min(max(int(len(each) / BYTES_PER_TOKEN), TOKENS_OF_IMAGE), MOST_TOKENS_OF_FILE)
            else:
                bytes_ += len(each) if each.isascii() else len(each.encode("utf-8", "surrogatepass"))
        elif isinstance(each, dict):
            bytes_ += sum(len(name) if name.isascii() else len(name.encode("utf-8", "surrogatepass")) for name in each)
            bytes_ += 2 * len(each)
            held = under in _HOLDERS and each.get("type", "base64") == "base64"
            media = each.get("media_type") or each.get("mimeType") or each.get("mime_type")
            for name, inner in each.items():
                if inner.__class__ is str and inner.isascii() and name not in _CARRIERS and under not in _CARRIERS:
                    bytes_ += len(inner)  # words, as most are
                    continue
                where = f"data:{media}" if held and name == "data" else _where(name, under)
                todo.append((inner, where, own or (name in _OWN and each is not body)))
        elif isinstance(each, list):
            todo += [(inner, under, own) for inner in each]
        else:
            bytes_ += 4
    most = bytes_ + images * MOST_TOKENS_OF_IMAGE + files
    return Size(
        max(1, int(bytes_ / BYTES_PER_TOKEN) + images * TOKENS_OF_IMAGE + files), min(max(1, most), MOST_INPUT_TOKENS)
    )


def _where(name: str, under: str) -> str:
    return under if name == "url" and under in _MEDIA else name


def _data(text: str, under: str) -> str | None:
    """What a text is to the driver that is no words: `image`, `file`; None: words."""
    if under.startswith("data:"):
        head, data = under, text
    elif under in _MEDIA and text.startswith("data:"):
        head, _, data = text.partition(",")
        if len(head) > 200:
            return None
    elif under == "file_data":
        head, data = "", text
    else:
        return None
    if _BASE64.match(data) is None:
        return None
    return "image" if head.startswith("data:image/") and under != "file_data" else "file"
