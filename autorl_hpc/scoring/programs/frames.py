"""What goes between checker and candidate: plain data as JSON in frames of a length and that many bytes.

Both directions use one form. Nothing that is read runs code or becomes an object of the sender's making: an answer arrives as
None, a bool, a number, text, bytes, or a container of these, and all else as something that equals nothing. A subclass arrives
as what it is a subclass of, so that an `__eq__` of its own stays behind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

HEAD_BYTES = 4
JSON_SAFE = 1 << 53
MOST_DRAWN = 100_000
"""Items taken of an iterator."""


class Ended(Exception):
    """The other side has closed the pipe."""


class NotPlain(Exception):
    """A frame is too long, or no plain data."""


class Opaque:
    """Stands for an answer that is no plain data; equals nothing but itself."""


class _Drawn:
    """An iterator's items: may be iterated over, and equals nothing, as the iterator did."""

    def __init__(self, items: list[object]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[object]:
        return iter(self._items)


def encode(value: object, *, whole: bool = False) -> object:
    """`value` as JSON's types.

    Args:
        whole: what is no plain data is an error; else it arrives as `Opaque`.

    Raises:
        NotPlain: it is nested too deeply, holds itself, or is no plain data though it has to be.
    """
    try:
        encoded = _encode(value)
    except RecursionError:
        raise NotPlain("nested too deeply") from None
    if whole and _holds_opaque(encoded):
        raise NotPlain("no plain data")
    return encoded


def _encode(value: object) -> object:
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -JSON_SAFE < number < JSON_SAFE else {"i": hex(number)}
    if isinstance(value, float):
        return {"f": float.hex(value)}
    if isinstance(value, complex):
        return {"c": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": value.hex()}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    for kind, letter in ((tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, kind):
            return {letter: [_encode(item) for item in value]}
    if isinstance(value, dict):
        return {"d": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if isinstance(value, range):
        return {"r": [_encode(part) for part in (value.start, value.stop, value.step)]}
    return _encode_rare(value)


def _encode_rare(value: object) -> object:
    kind = (type(value).__module__, type(value).__qualname__)
    if kind == ("decimal", "Decimal"):
        return {"D": str(value)}
    if kind == ("fractions", "Fraction"):
        return {"F": [hex(getattr(value, name)) for name in ("numerator", "denominator")]}
    if isinstance(value, Iterator):
        items = []
        for item in value:
            items.append(_encode(item))
            if len(items) > MOST_DRAWN:
                return {"o": 0}
        return {"n": items}
    return {"o": 0}


def _holds_opaque(encoded: object) -> bool:
    if isinstance(encoded, list):
        return any(map(_holds_opaque, encoded))
    return isinstance(encoded, dict) and ("o" in encoded or any(map(_holds_opaque, encoded.values())))


def decode(value: object) -> object:
    """The plain data behind what `encode` made.

    Raises:
        NotPlain: it was made by something else.
    """
    try:
        return _decode(value)
    except NotPlain:
        raise
    except Exception as error:  # a forged frame can be wrong in any way
        raise NotPlain(type(error).__name__) from None


def _decode(value: object) -> object:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((letter, inside),) = value.items()
    return _DECODERS[letter](inside)


def _decimal(text: str) -> object:
    from decimal import Decimal

    return Decimal(text)


def _fraction(parts: list[str]) -> object:
    from fractions import Fraction

    numerator, denominator = (int(part, 16) for part in parts)
    return Fraction(numerator, denominator)


def _range(parts: list[object]) -> object:
    start, stop, step = (int(_decode(part)) for part in parts)  # type: ignore[call-overload]  # else it raises
    return range(start, stop, step)


_DECODERS: dict[str, Callable[..., object]] = {
    "i": lambda text: int(text, 16),
    "f": float.fromhex,
    "c": lambda parts: complex(float.fromhex(parts[0]), float.fromhex(parts[1])),
    "b": bytes.fromhex,
    "t": lambda items: tuple(map(_decode, items)),
    "s": lambda items: set(map(_decode, items)),
    "z": lambda items: frozenset(map(_decode, items)),
    "d": lambda pairs: {_decode(key): _decode(item) for key, item in pairs},
    "r": _range,
    "D": _decimal,
    "F": _fraction,
    "n": lambda items: _Drawn([_decode(item) for item in items]),
    "o": lambda _: Opaque(),
}


def framed(message: object) -> bytes:
    """A frame's bytes.

    Raises:
        NotPlain: it can't be written as JSON.
    """
    try:
        data = json.dumps(message, separators=(",", ":")).encode("ascii")
    except (ValueError, TypeError, RecursionError):
        raise NotPlain("no JSON") from None
    return len(data).to_bytes(HEAD_BYTES, "big") + data


def write(pipe: int, message: object) -> None:
    """Writes one frame.

    Raises:
        Ended, NotPlain: nobody reads; it can't be written as JSON.
    """
    data = framed(message)
    try:
        while data:
            data = data[os.write(pipe, data) :]
    except BrokenPipeError:
        raise Ended from None


def read(pipe: int, most_bytes: int, wait: Callable[[int], None] = lambda _: None) -> object:
    """Reads one frame, never a byte of the next.

    Args:
        wait: called with the pipe before each read, which may block.

    Raises:
        Ended, NotPlain: the pipe was closed; the frame is longer than `most_bytes` or no JSON.
    """
    following = int.from_bytes(_read(pipe, HEAD_BYTES, wait), "big")
    if following > most_bytes:
        raise NotPlain("too long")
    return _loaded(_read(pipe, following, wait))


def length(data: bytes) -> int:
    """Of the whole frame that begins so."""
    return HEAD_BYTES + int.from_bytes(data[:HEAD_BYTES], "big")


def unframed(data: bytes) -> dict[str, object]:
    """The object in a frame's bytes.

    Raises:
        NotPlain: these are not the bytes of one frame with an object.
    """
    value = _loaded(data[HEAD_BYTES:])
    if not isinstance(value, dict) or len(data) != length(data):
        raise NotPlain("no frame")
    return value


def _loaded(data: bytes) -> object:
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError, MemoryError):
        raise NotPlain("no JSON") from None
    return value


def _read(pipe: int, missing: int, wait: Callable[[int], None]) -> bytes:
    parts: list[bytes] = []
    while missing:
        wait(pipe)
        part = os.read(pipe, min(missing, 1 << 20))
        if not part:
            raise Ended
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
