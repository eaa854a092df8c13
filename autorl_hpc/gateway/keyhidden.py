"""A stream without the driver's key, should the driver quote it: of the same length, so that announced lengths stay true."""

from __future__ import annotations


class KeyHidden:
    """Puts stars in place of a key, wherever pieces of the stream meet.

    A piece that ends as the key begins is held back that far, until the next one tells.
    """

    def __init__(self, key: str | None) -> None:
        self._key = (key or "").encode("utf-8", "surrogateescape")
        self._stars = b"*" * len(self._key)
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What passes now."""
        if not self._key:
            return data
        data = (self._held + data).replace(self._key, self._stars)
        begins = self._begin_in(data)
        data, self._held = data[:begins], data[begins:]
        return data

    def end(self) -> bytes:
        """What is left when the stream has ended."""
        rest, self._held = self._held, b""
        return rest

    def _begin_in(self, data: bytes) -> int:
        """Where a beginning of the key stands that reaches to the end of the data; else its length."""
        at = data.find(self._key[:1], max(0, len(data) - len(self._key) + 1))
        while at >= 0 and not self._key.startswith(data[at:]):
            at = data.find(self._key[:1], at + 1)
        return at if at >= 0 else len(data)
