"""JSON as only one reader can read it: what two readers may read in two ways is refused, so that nothing passes unseen."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from autorl_hpc.gateway.refusals import Refusal

MAX_DEPTH = 200
"""Of nesting. Tools' schemas have some twenty."""


MAX_VALUES: Final = 300_000
"""Of one body: a value takes up to a hundred times its bytes while it is read."""

_STARTS: Final = b",[{"
_NESTS: Final = (dict, list)
_STRUCTURE: Final = re.compile(rb'"[^"]*"?|[\[{,]')


def read_object(data: bytes) -> dict[str, Any]:
    """The object in a request's body.

    Raises:
        Refusal: it is not UTF-8, no JSON, no object, too deep, has too many values, or a name twice in one object.
    """
    if has_more_values(data, MAX_VALUES):
        raise Refusal(413, "too_large", f"a request's body may have {MAX_VALUES:,} values")
    try:
        text = data.decode("utf-8", "strict")
    except UnicodeDecodeError:
        raise _bad("it is not UTF-8") from None
    if text.startswith("\ufeff"):
        raise _bad("it begins with a byte order mark")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise _bad("it is nested too deeply") from None
    except ValueError as error:
        raise _bad(str(error)[:200]) from None
    if not isinstance(value, dict):
        raise _bad("it is no object")
    if _depth(value) > MAX_DEPTH:
        raise _bad("it is nested too deeply")
    return value


def has_more_values(data: bytes, most: int) -> bool:
    """Whether JSON has more than `most` values, before it is read: each is the first one, or follows a comma, or is within an object or
    a list of its own. Takes no memory by their number."""
    if len(data) - len(data.translate(None, _STARTS)) < most:
        return False
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    found = texts = 0
    for match in _STRUCTURE.finditer(plain):
        if plain[match.start()] == 0x22:
            texts += 1
        else:
            found += 1
        if found >= most or texts > 2 * most + 2:
            return True
    return False


def _bad(why: str) -> Refusal:
    return Refusal(400, "unreadable", f"the driver's gateway can't read this request's body: {why}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return made


def _constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _depth(value: Any) -> int:
    """Without recursion."""
    deepest, level = 0, [value]
    while level and deepest <= MAX_DEPTH:
        deepest += 1
        level = [
            one
            for each in level
            for one in (each.values() if isinstance(each, dict) else each)
            if isinstance(one, _NESTS)
        ]
    return deepest
