"""A driver's key in a stream: gone wherever pieces meet, and nothing else changed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autorl_hpc.files.redact import KeyHidden

KEY = "aabaac"
PIECES = st.lists(st.text("abcx", max_size=9) | st.just(KEY) | st.just(KEY[:5]), max_size=12)


@given(PIECES)
def test_pieces_pass_as_the_whole_would(pieces: list[str]) -> None:
    hidden = KeyHidden(KEY)
    passed = b"".join(hidden.feed(piece.encode()) for piece in pieces) + hidden.end()
    assert passed.decode() == "".join(pieces).replace(KEY, "*" * len(KEY))


def test_what_can_not_begin_a_key_is_not_held_back() -> None:
    hidden = KeyHidden("sk-1234")
    assert hidden.feed(b"data: sk-12\n\n") == b"data: sk-12\n\n"
    assert hidden.feed(b"data: sk-12") == b"data: " and hidden.feed(b"3 5\n\n") == b"sk-123 5\n\n"


def test_without_a_key_everything_passes() -> None:
    for key in (None, ""):
        assert KeyHidden(key).feed(b"anything") == b"anything" and KeyHidden(key).end() == b""
