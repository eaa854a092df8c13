"""Bodies that two readers may read in two ways are refused, and so are those of more values than memory is for."""

from __future__ import annotations

import pytest
from draws import OFTEN
from hypothesis import given
from hypothesis import strategies as st

from autorl_hpc.gateway.request import Refusal
from autorl_hpc.gateway.server import read_object

TWO_WAYS = [
    *(b'{"tools": [{"type": "web_search"}], "tools": []}', b'{"tools": [], "\\u0074ools": [{"type": "web_search"}]}'),
    *(b'{"a": {"type": "text", "type": "image_url"}}', b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1} {"b": 2}', b'{"a": 1,}'),
    *(b"{'a': 1}", b'{"a": 1} // comment', b"[1]", b'"text"', b"", b"null", b"\xef\xbb\xbf{}", b'{"a": "\xff"}', b'{"a": "\xc0\xaf"}'),
    *('{"a": 1}'.encode("utf-16"), '{"a": 1}'.encode("utf-32"), b'{"a": ' + b"9" * 10_000 + b"}", b'{"a": "tab\there"}'),
    b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("data", TWO_WAYS, ids=lambda data: repr(data[:30]))
def test_what_two_readers_may_read_in_two_ways_is_refused(data: bytes) -> None:
    with pytest.raises(Refusal):
        read_object(data)


@pytest.mark.parametrize(
    "many", [b'{"":1},' * 700_000 + b"0", b"[]," * 700_000 + b"0", b"0," * 700_000 + b"0", b'"",' * 700_000 + b'""']
)
def test_a_body_of_more_values_than_memory_is_for_is_refused(many: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        read_object(b'{"metadata":[' + many + b"]}")
    assert caught.value.status == 413


@OFTEN
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        assert isinstance(read_object(data), dict)
    except Refusal:
        pass
