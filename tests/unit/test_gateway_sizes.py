"""What a request may cost is estimated before it is let in: how long an answer may become, how long an input is."""

from __future__ import annotations

from typing import Any

import pytest
from bodies import item, parts, user

from autorl_hpc.gateway.request import ANTHROPIC, CHAT, GEMINI, RESPONSES, Refusal
from autorl_hpc.gateway.token_usage import MOST_INPUT_TOKENS, asked, size_of


@pytest.mark.parametrize(
    ("dialect", "body", "out"),
    [
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 7, "n": 3}, 21),
        (CHAT, {"max_tokens": 9, "max_completion_tokens": 7}, 9),
        (CHAT, {"max_tokens": None, "n": None}, 99),
        (RESPONSES, {"max_output_tokens": 5}, 5),
        (ANTHROPIC, {"max_tokens": 5}, 5),
        (GEMINI, {"generation_config": {"max_output_tokens": 5}}, 5),
        (GEMINI, {"generationConfig": {"maxOutputTokens": "60000", "candidateCount": "8"}}, 480_000),
        (GEMINI, {"generationConfig": None}, 99),
    ],
)
def test_how_long_an_answer_may_become(dialect: str, body: dict[str, Any], out: int) -> None:
    assert asked(dialect, body, 99).tokens_out == out


def test_what_two_may_read_in_two_ways_is_refused() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [(CHAT, {"stream": stream}) for stream in ("true", 1, [], {})]
    for value in (True, -5, 0, 5.0, "5", "90000", 10**30, [5], {}):
        fields = [(CHAT, "max_tokens"), (CHAT, "n"), (RESPONSES, "max_output_tokens"), (ANTHROPIC, "max_tokens")]
        cases += [(dialect, {name: value}) for dialect, name in fields]
        if not isinstance(value, str):
            cases += [(GEMINI, {"generationConfig": {name: value}}) for name in ("maxOutputTokens", "candidate_count")]
    cases += [(CHAT, {"n": 100_000}), (GEMINI, {"generationConfig": {"candidateCount": "17"}})]
    cases += [(GEMINI, {"generationConfig": config}) for config in ([], {"maxOutputTokens": 5, "max_output_tokens": 6})]
    for dialect, body in cases:
        with pytest.raises(Refusal) as caught:
            asked(dialect, body, 99)
        assert caught.value.status == 400, (dialect, body)


IMAGE = "data:image/png;base64," + "A" * 4_000_000
NO_SPACES = "A" * 100_000
IMAGES = [
    user([{"type": "image_url", "image_url": {"url": IMAGE}}]),
    item({"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}),
    user([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBOR" * 100_000}}]),
    parts({"inlineData": {"mimeType": "image/png", "data": NO_SPACES}}),
    parts({"inline_data": {"mime_type": "image/png", "data": NO_SPACES}}),
]
WORDS = [
    user(NO_SPACES),
    user([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "some words " * 10_000}}]),
    user([{"type": "tool_use", "name": "f", "input": {"source": {"type": "base64", "data": NO_SPACES}}}]),
    {"input": NO_SPACES},
    parts({"text": NO_SPACES}),
]


def test_an_image_is_not_counted_by_its_bytes_and_words_are() -> None:
    assert all(1500 <= size_of(body) < 1600 for body in IMAGES)
    assert all(size_of(body) >= 25_000 for body in WORDS)


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        ({"input": "hi", "previous_response_id": "resp_1"}, True),
        (item({"type": "item_reference", "id": "msg_1"}), True),
        (item({"type": "reasoning", "id": "rs_1", "summary": []}), True),
        (item({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}), False),
        (item({"type": "message", "role": "user", "content": "hi"}), False),
        ({"input": "hi", "previous_response_id": None}, False),
    ],
)
def test_what_lies_at_the_provider_may_be_as_long_as_a_window(body: dict[str, Any], stored: bool) -> None:
    assert asked(RESPONSES, body, 99, 1000).most_in == (MOST_INPUT_TOKENS if stored else 1000)
