"""Bodies that two readers may read in two ways are refused, and so are those of more values than memory is for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from draws import OFTEN, json_values
from hypothesis import given
from hypothesis import strategies as st

from autorl_hpc.gateway.request import Refusal
from autorl_hpc.gateway.server import has_more_values, read_object

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


def values_of(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return 1 + sum(map(values_of, inner))


@OFTEN
@given(st.recursive(json_values, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30))
def test_values_are_counted_before_they_are_read(value: Any) -> None:
    for spaces in (None, 1):
        for ascii_only in (True, False):
            data = json.dumps(value, indent=spaces, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
            assert not has_more_values(data, 2 * values_of(value) + 1), "commas in texts are no values"
            if values_of(value) > 2:
                assert has_more_values(data, values_of(value) // 2)


@pytest.mark.parametrize(
    "many", [b'{"":1},' * 400_000 + b"0", b"[]," * 400_000 + b"0", b"0," * 400_000 + b"0", b'"",' * 400_000 + b'""']
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
