"""The judge over HTTP, against a real server on the loopback: what it takes, what it retries, what it gives up on."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S
from judge_server import JudgeServer, Reply, completion, likely

from autorl_hpc.errors import AutorlError
from autorl_hpc.records.experiment import JudgeSpec
from autorl_hpc.scoring.judge_cache import JudgeCache
from autorl_hpc.scoring.judges import HttpJudge, make_judge, read_key
from autorl_hpc.scoring.outcome import JudgeFailed, Verdict

Replies = Callable[[int, dict[str, Any]], Reply]
Serve = Callable[[Replies], JudgeServer]
KEY = "sk-test-0123456789abcdef"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[JudgeServer] = []

    def start(replies: Replies) -> JudgeServer:
        servers.append(JudgeServer(replies))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


def always(reply: Reply) -> Replies:
    return lambda number, body: reply


def first(*replies: Reply) -> Replies:
    """These in turn, then a plain answer."""
    return lambda number, body: replies[number - 1] if number <= len(replies) else Reply()


def judge(server: JudgeServer, cache: Path | None = None, **fields: Any) -> HttpJudge:
    values = {"url": server.url, "model": "judge", "retries": 3, "timeout_s": PATIENCE_S, **fields}
    return HttpJudge(JudgeSpec(**values), None if cache is None else JudgeCache(cache), first_pause_s=0.02)


def talks(number: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"question {n}"}] for n in range(number)]


def ask(asked: HttpJudge, number: int = 1, **fields: Any) -> list[Verdict]:
    return asked.ask(talks(number), max_tokens=8, **fields)


# --- answers ---


def test_answers_come_in_order_and_are_counted(serve: Serve) -> None:
    server = serve(lambda number, body: Reply(completion(body["messages"][0]["content"]), after_s=0.02 * (number % 3)))
    asked = judge(server, price_in=2.0, price_out=10.0)
    before = asked.usage
    verdicts = asked.ask([*talks(20), *talks(20)], max_tokens=8)  # the same question is sent once
    assert [verdict.text for verdict in verdicts] == [f"question {n}" for n in range(20)] * 2
    assert asked.usage.since(before) == {
        "judge_requests": 20.0,
        "judge_cached": 0.0,
        "judge_prompt_tokens": 2000.0,
        "judge_completion_tokens": 40.0,
        "judge_cost": pytest.approx((2000 * 2 + 40 * 10) / 1e6),
    }
    (request, *_) = server.asked
    assert request.path == "/v1/chat/completions" and "Authorization" not in request.headers
    assert request.body == {"model": "judge", "temperature": 0, "max_tokens": 8, "messages": request.body["messages"]}


# --- passing troubles ---

TROUBLES: list[tuple[str, Reply]] = [
    ("busy", Reply({"error": {"message": "slow down"}}, 429)),
    ("busy, come in a moment", Reply({}, 429, {"Retry-After": "0.1"})),
    *((f"busy until {when!r}", Reply({}, 429, {"Retry-After": when})) for when in ("inf", "soon")),
    ("not up yet", Reply(b"", 503)), ("cut off in the middle", Reply(cut=20)),
    ("no JSON", Reply(b"\xff\xfe garbage {")), ("choices of another kind", Reply({"choices": "1"})),
    ("an error as a success", Reply({"error": "overloaded"})),
    ("a list for a text", Reply({"choices": [{"message": {"content": ["1"]}}]})),
    ("nested for ever", Reply(b"[" * 100_000)), ("far too long", Reply(b" " * (5 * 1024 * 1024))),
]  # fmt: skip


@pytest.mark.parametrize("reply", [row[1] for row in TROUBLES], ids=[row[0] for row in TROUBLES])
def test_a_passing_trouble_is_tried_again(serve: Serve, reply: Reply) -> None:
    server = serve(first(reply, reply))
    asked = judge(server)
    assert ask(asked) == [Verdict("1")]
    assert len(server.asked) == 3 and asked.usage.requests == 3


def test_all_wait_as_long_as_the_endpoint_asks(serve: Serve) -> None:
    server = serve(lambda number, body: Reply() if number > 1 else Reply({}, 429, {"Retry-After": "1"}))
    ask(judge(server, concurrency=1), 3)
    times = [asked.at for asked in server.asked]
    assert times[1] - times[0] > 0.8 and len(times) == 4


# --- lasting troubles ---


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply({"error": {"message": "no such model"}}, 404), "answered 404: no such model"),
        (Reply({"error": {"message": "bad key"}}, 401), "answered 401: bad key"),
        (Reply(b"", 302, {"Location": "http://127.0.0.1:1/elsewhere"}), "answered 302"),
        (Reply(b"", 307, {"Location": "http://127.0.0.1:1/elsewhere"}), "answered 307"),
        (Reply(completion(model="other-model")), "answered as model `other-model`, asked was `judge`"),
    ],
)
def test_what_no_try_can_help_is_told_at_once(serve: Serve, reply: Reply, words: str) -> None:
    server = serve(always(reply))
    with pytest.raises(JudgeFailed, match=words):
        ask(judge(server, concurrency=2), 40)
    assert len(server.asked) <= 4


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": None}, {"logprobs": {"content": []}}, {"logprobs": {"content": [{}]}}]
)
def test_an_endpoint_without_log_probabilities_says_what_to_do(serve: Serve, fields: dict[str, Any]) -> None:
    server = serve(always(Reply(completion("m", **fields))))
    with pytest.raises(JudgeFailed, match=r"gives no log probabilities.*discrete"):
        ask(judge(server), 5, logprobs=5)


@pytest.mark.parametrize("status", [400, 403])
def test_a_conversation_that_is_refused_does_not_stop_the_others(serve: Serve, status: int) -> None:
    def replies(number: int, body: dict[str, Any]) -> Reply:
        bad = body["messages"][0]["content"] == "question 3"
        return Reply({"error": {"message": "filtered"}}, status) if bad else Reply()

    verdicts = ask(judge(serve(replies)), 6)
    assert [verdict.text for verdict in verdicts] == ["1", "1", "1", "", "1", "1"]
    assert verdicts[3].refused.endswith(f"answered {status}: filtered")


# --- the cache ---


def test_what_was_answered_is_not_asked_again(serve: Serve, tmp_path: Path) -> None:
    server = serve(always(Reply(completion("M", logprobs=likely(M=-0.25)))))
    before = ask(judge(server, tmp_path), 5, logprobs=5)
    server.replies = always(Reply({}, 500))
    again = judge(server, tmp_path)
    assert ask(again, 5, logprobs=5) == before
    assert again.usage.since(judge(server).usage)["judge_cached"] == 5
    assert len(server.asked) == 5
    for path in tmp_path.rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077
    with pytest.raises(JudgeFailed):  # other parameters are another question
        ask(judge(server, tmp_path, retries=0, parameters={"seed": 1}), 1, logprobs=5)


@pytest.mark.parametrize("changed", ["url", "revision"])
def test_what_another_judge_answered_is_not_taken(serve: Serve, tmp_path: Path, changed: str) -> None:
    server, other = serve(always(Reply())), serve(always(Reply(completion("2"))))
    assert ask(judge(server, tmp_path, revision="2026-01"), 3) == [Verdict("1")] * 3
    if changed == "url":
        assert ask(judge(other, tmp_path, revision="2026-01"), 3) == [Verdict("2")] * 3
    else:
        server.replies = always(Reply(completion("2")))  # other weights under the same name and address
        assert ask(judge(server, tmp_path, revision="2026-02"), 3) == [Verdict("2")] * 3
    assert ask(judge(server, tmp_path, revision="2026-01"), 3) == [Verdict("1")] * 3


@pytest.mark.parametrize(
    ("given", "logprobs", "kept"),
    [
        (completion(""), 0, False),
        (completion(" \n"), 0, False),
        (completion("1 bec", finish_reason="length"), 0, False),
        (completion("1", finish_reason="content_filter"), 0, False),
        (completion("1", finish_reason=None), 0, True),
        (completion("M", logprobs=likely(M=-0.25), finish_reason="length"), 5, True),
    ],
)
def test_what_can_be_no_verdict_is_not_kept(
    serve: Serve, tmp_path: Path, given: dict[str, Any], logprobs: int, kept: bool
) -> None:
    server = serve(always(Reply(given)))
    for _ in range(2):
        ask(judge(server, tmp_path), logprobs=logprobs)
    assert len(server.asked) == (1 if kept else 2)


# --- the key ---


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "judge.key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return path


def test_the_key_is_in_the_header_and_nowhere_else(
    serve: Serve, tmp_path: Path, key_file: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    quotes_it = Reply({"error": {"message": f"wrong key {KEY} given"}}, 500)
    server = serve(first(quotes_it, Reply({"choices": KEY})))
    asked = judge(server, tmp_path / "cache", key_file=str(key_file))
    with caplog.at_level(logging.DEBUG):
        ask(asked, 3)
        server.replies = always(Reply({"error": {"message": f"wrong key {KEY} given"}}, 401))
        with pytest.raises(JudgeFailed, match=r"wrong key \*\*\* given") as caught:
            ask(asked, 9)
    assert {request.headers["Authorization"] for request in server.asked} == {f"Bearer {KEY}"}
    assert not any(KEY in str(request.body) + request.path for request in server.asked)
    chain: list[BaseException] = [caught.value]
    while following := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__):
        chain.append(following)
    told = "".join(map(repr, chain)) + caplog.text + "".join(capfd.readouterr()) + repr(asked.spec)
    assert KEY not in told
    assert list((tmp_path / "cache").rglob("*.json"))
    assert not any(KEY in path.read_text() for path in (tmp_path / "cache").rglob("*.json"))


def test_a_redirect_does_not_carry_the_key_away(serve: Serve, key_file: Path) -> None:
    thief = serve(always(Reply()))
    server = serve(always(Reply(b"", 307, {"Location": f"{thief.url}/chat/completions"})))
    with pytest.raises(JudgeFailed, match="answered 307"):
        ask(judge(server, key_file=str(key_file)))
    assert not thief.asked


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        *((KEY.encode(), mode, "can be read by others") for mode in (0o644, 0o640, 0o604, 0o660)),
        *(
            (content, 0o600, "is not a single line")
            for content in (b"", b"two words", b"a\nb", b"\xff\xfe", b"k" * 5000)
        ),
    ],
)
def test_a_key_that_is_none_or_open_to_others(key_file: Path, content: bytes, mode: int, words: str) -> None:
    key_file.write_bytes(content)
    key_file.chmod(mode)
    with pytest.raises(AutorlError, match=f"field `judge.key_file`: the judge's key .*{words}") as caught:
        read_key(JudgeSpec(url="http://x", model="m", key_file=str(key_file)))
    assert "two words" not in str(caught.value) and KEY not in str(caught.value)


# --- proxies ---


def test_the_environment_s_proxy_is_used_but_not_for_this_machine(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, server = serve(always(Reply())), serve(always(Reply()))
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
    assert ask(judge(server)) == [Verdict("1")] and not proxy.asked
    assert ask(judge(server, url="http://judge.invalid/v1")) == [Verdict("1")]
    assert proxy.asked[0].path == "http://judge.invalid/v1/chat/completions"


# --- the experiment's judge ---


def test_a_run_is_not_judged_by_another_judge(tmp_path: Path) -> None:
    spec = JudgeSpec(url="http://127.0.0.1:1/v1", model="new")
    assert make_judge(spec, "new", tmp_path).model == "new"
    for given in (spec, None):
        with pytest.raises(AutorlError, match=r"recipe asks the judge old, the experiment's is (new|none)") as caught:
            make_judge(given, "old", tmp_path)
        assert "judge.model: old" in (caught.value.next_step or "")
    with pytest.raises(AutorlError, match=r"revision 2026-01, the experiment's is unsaid"):
        make_judge(spec, "new", tmp_path, "2026-01")
