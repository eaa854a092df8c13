"""Searches of agents and graders: BM25 against a plain computation, an engine on the internet (here a server of the test's own) and its
key that nobody sees, what is recorded and replayed, and what episodes see of it."""

from __future__ import annotations

import hashlib
import http.server
import json
import math
import os
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S

from autorl_hpc.rollouts.pool import Pool, Reply
from autorl_hpc.rollouts.search.backends import (
    FOLDER,
    K1,
    B,
    Document,
    Online,
    RecordedAnswers,
    Result,
    SearchFailed,
    Setup,
    TermIndex,
    identity_of,
    key_of,
    make_backend,
    snippet,
    terms,
    write_corpus,
)
from autorl_hpc.rollouts.search.search_environment import MAX_RESULT_CHARS, NOTHING, Environment, shown
from autorl_hpc.rollouts.source import Source


@pytest.fixture(autouse=True)
def no_connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Nothing leaves this machine, and nothing but a test's own server is connected to."""
    tried: list[Any] = []
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        tried.append(address)
        if not (isinstance(address, tuple) and address[0] == "127.0.0.1"):
            raise AssertionError(f"a connection to {address} was opened")
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    return tried


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "vault" / "task"
    write_corpus(folder / "corpus.jsonl", [Document("Orlen", "u:1", "Orlen is a town on the river Tesh.")])
    return folder


def sha(data: Path) -> str:
    return hashlib.sha256((data / "corpus.jsonl").read_bytes()).hexdigest()


# --- BM25, snippets


def brute_force(texts: list[list[str]], query: list[str]) -> list[float]:
    """The score of each text by BM25's formula."""
    average = sum(map(len, texts)) / len(texts)
    scores = [0.0] * len(texts)
    for term in query:
        holding = sum(term in other for other in texts)
        idf = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
        for number, words in enumerate(texts):
            times = words.count(term)
            scores[number] += idf * times / (times + K1 * (1 - B + B * len(words) / average))
    return scores


@pytest.mark.parametrize("seed", range(5))
def test_bm25_ranks_as_the_formula_does(seed: int) -> None:
    draw = np.random.default_rng(seed)
    vocabulary = [f"w{n}" for n in range(30)]
    texts = [[str(word) for word in draw.choice(vocabulary, size=draw.integers(1, 40))] for _ in range(60)]
    index = TermIndex(texts)
    for _ in range(20):
        query = [str(word) for word in draw.choice([*vocabulary, "unknown"], size=draw.integers(1, 6))]
        scores = brute_force(texts, query)
        found = index.best(query, 10)
        best = [score for score in sorted(scores, reverse=True)[:10] if score]
        # Equal scores may differ in the last bit by the order of addition, so numbers may be exchanged.
        assert [scores[number] for number in found] == pytest.approx(best)


def test_equal_scores_stand_in_the_corpus_order_and_what_holds_no_term_is_not_found() -> None:
    assert terms("The ÉCOLE of \uff32\uff24 2,023 Straße, don't") == ["école", "rd", "2", "023", "strasse", "don", "t"]
    index = TermIndex(terms(text) for text in ["red apple", "blue", "red apple", "apple red"])
    assert index.best(["apple"], 3) == [0, 2, 3] and index.best(["apple"], 2) == [0, 2]
    assert index.best(["green"], 3) == index.best(terms("the of"), 3) == index.best([], 3) == []
    assert TermIndex([]).best(["x"], 3) == TermIndex([[], []]).best(["x"], 3) == []


LONG = " ".join(f"word{n}" for n in range(300))


@pytest.mark.parametrize("query", ["word150", "word0", "word299", "nothing", "word10 word12 word200", ""])
@pytest.mark.parametrize("chars", [40, 100, 300])
def test_a_snippet_shows_where_the_words_are(query: str, chars: int) -> None:
    part = snippet(LONG, query, chars)
    assert len(part) <= chars and part in LONG and len(part) > chars // 2
    assert all(word in LONG.split() for word in part.split()), "a word was cut"
    if query.startswith("word"):
        assert query.split(maxsplit=1)[0] in part.split()


# --- an engine on the internet

KEY = "s3cr3t-key"


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers by a plan; what it was asked is kept."""

    plan: list[tuple[int, bytes]]
    asked: list[tuple[dict[str, list[str]], dict[str, str]]]

    def do_GET(self) -> None:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        self.asked.append((query, dict(self.headers)))
        status, body = self.plan[min(len(self.asked), len(self.plan)) - 1]
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://192.0.2.1/elsewhere")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


FOUND = json.dumps(
    {"organic_results": [{"title": f"T{n}", "link": f"https://x/{n}", "snippet": f"S\n{n}"} for n in range(5)]}
).encode()


@pytest.fixture
def engine() -> Iterator[tuple[type[Engine], str]]:
    handler = type("Planned", (Engine,), {"plan": [(200, FOUND)], "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_address[1]}/search"
    server.shutdown()
    server.server_close()


def online(address: str, **more: str) -> Online:
    options = {"search_url": address + "?q={query}&num={results}&api_key={key}", "search_date": "2026-11", **more}
    return Online(options, KEY, first_pause_s=0.01)


def test_an_engine_is_asked_and_its_results_are_read(engine: tuple[type[Engine], str]) -> None:
    handler, address = engine
    found = online(address).search("who & what? é ]", 2)
    assert found == [Result("T0", "https://x/0", "S 0"), Result("T1", "https://x/1", "S 1")]
    assert handler.asked[0][0] == {"q": ["who & what? é ]"], "num": ["2"], "api_key": [KEY]}


@pytest.mark.parametrize(
    ("form", "answer", "empty"),
    [
        ("error=No results.", b'{"error": "No results."}', True),
        ("error=No results.", b'{"error": "quota"}', False),
        ("search.total=0", b'{"search": {"total": 0}}', True),
        ("nothing", b'{"nothing": true}', True),
        ("nothing", b'{"nothing": false}', False),
    ],
)
def test_how_an_engine_says_that_it_found_nothing_is_an_option(
    engine: tuple[type[Engine], str], form: str, answer: bytes, empty: bool
) -> None:
    handler, address = engine
    handler.plan = [(200, answer)]
    backend = online(address, search_empty=form)
    assert backend.identity != online(address).identity
    if empty:
        assert backend.search("x", 3) == []
    else:
        with pytest.raises(SearchFailed):
            backend.search("x", 3)


@pytest.mark.parametrize(
    ("plan", "asked", "words"),
    [
        ([(500, KEY.encode())], 3, "HTTP status 500"), ([(401, KEY.encode())], 1, "HTTP status 401"),
        ([(302, b"")], 1, "HTTP status 302"), ([(200, b"<html>")], 3, "no JSON"),
        ([(200, b"[" * 100_000)], 3, "no JSON"),
        ([(200, b'{"error": "quota"}')], 1, "holds `error`; .*`search_empty`"),
        ([(200, b'{"organic": []}')], 1, "no list of objects at `organic_results`"),
        ([(200, b'{"organic_results": [7]}')], 1, "no list of objects at"),
        (
            [(200, b'{"organic_results": [{"title": "t", "link": "l", "snipet": "s"}]}')],
            1,
            r"field `snippet` \(search_snippet\)",
        ),
        ([(200, b'{"organic_results": [{"heading": "t", "link": "l", "snippet": "s"}]}')], 1, r"\(search_title\)"),
        ([(200, b'{"organic_results": []}')], 1, None),
        ([(200, b'{"error": null, "organic_results": []}')], 1, None), ([(200, b"[]")], 1, "no list of objects at"),
        ([(200, b'"' + b"x" * 5_000_000 + b'"')], 1, "longer than"),
    ],
)  # fmt: skip
def test_trouble_is_a_failure_that_shows_no_key(
    engine: tuple[type[Engine], str], plan: list[tuple[int, bytes]], asked: int, words: str | None
) -> None:
    handler, address = engine
    handler.plan = plan
    if words is None:
        assert online(address).search("x", 3) == []
        return
    with pytest.raises(SearchFailed, match=words) as caught:
        online(address).search("x", 3)
    assert len(handler.asked) == asked and KEY not in str(caught.value) and "127.0.0.1" in str(caught.value)


def test_a_key_file_is_for_its_owner_alone(data: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    options = {
        "search": "online",
        "search_url": "https://x/?q={query}&k={key}",
        "search_date": "2026-11",
        "search_key_file": str(key),
    }
    os.chmod(key, 0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        make_backend(Setup(options, data, held_out=True))
    os.chmod(key, 0o600)
    backend = make_backend(Setup(options, data, held_out=True))
    assert KEY not in backend.identity and backend.identity == identity_of(options)
    key.write_text("two words")
    with pytest.raises(ValueError, match="holds no key"):
        make_backend(Setup(options, data, held_out=True))


def test_what_graders_ask_online_is_recorded_and_replayed_without_it(
    engine: tuple[type[Engine], str], data: Path, no_connections: list[Any]
) -> None:
    handler, address = engine
    options = {"search": "online", "search_url": address + "?q={query}", "search_date": "2026-11"}
    first = make_backend(Setup(options, data, held_out=True)).search("x", 2)
    assert make_backend(Setup(options, data, held_out=True)).search("x", 2) == first and len(handler.asked) == 1
    assert (data.parent / FOLDER).is_dir() and not (data / FOLDER).exists()
    no_connections.clear()
    replay = make_backend(Setup({**options, "search": "replay"}, data, held_out=True))
    assert replay.search("x", 2) == first and no_connections == []
    later = make_backend(Setup({**options, "search": "replay", "search_date": "2026-12"}, data, held_out=True))
    with pytest.raises(SearchFailed):
        later.search("x", 2)
    make_backend(Setup({**options, "search_record": False}, data, held_out=True)).search("y", 2)
    with pytest.raises(SearchFailed):
        replay.search("y", 2)


def test_an_engine_that_is_away_is_a_failure_that_shows_no_key() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"  # where nobody listens as long as it is ours
        with pytest.raises(SearchFailed, match="could not be asked") as caught:
            online(address).search("x", 3)
    assert KEY not in str(caught.value)


# --- what is recorded

NAME = "counting/1"


class Counting:
    """A back end that answers each time otherwise."""

    identity = NAME

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def search(self, query: str, k: int) -> list[Result]:
        self.asked.append((query, k))
        if query == "fails":
            raise SearchFailed("away")
        return [Result(f"{query} é \ud83d", "u", f"answer {len(self.asked)}")] if query != "nothing" else []


def test_what_was_asked_once_stays_and_can_be_replayed(tmp_path: Path) -> None:
    backend = Counting()
    recording = RecordedAnswers(NAME, tmp_path / "cache", backend)
    first = recording.search("tesh river", 3)
    assert recording.search(" tesh  river\n", 3) == first and len(backend.asked) == 1
    assert recording.search("tesh river", 2) != first, "another number of results is another question"
    assert recording.search("nothing", 3) == [] == recording.search("nothing", 3)
    assert len(backend.asked) == 3
    replay = RecordedAnswers(NAME, tmp_path / "cache")
    assert replay.search("tesh river", 3) == first
    assert replay.search("nothing", 3) == [], "that nothing was found was recorded"
    assert len(backend.asked) == 3

    class Slow(Counting):
        def search(self, query: str, k: int) -> list[Result]:
            assert recording.search(query, k)  # another grader, which asked later and was answered first
            return [Result("late", "", "")]

    late = RecordedAnswers(NAME, tmp_path / "cache", Slow()).search("loom", 3)
    assert late == replay.search("loom", 3) == recording.search("loom", 3) != [Result("late", "", "")]


def test_a_miss_of_a_replay_is_an_error_and_no_empty_result(tmp_path: Path) -> None:
    RecordedAnswers(NAME, tmp_path, Counting()).search("a", 3)
    for query, k, identity in (("b", 3, "counting/1"), ("a", 4, "counting/1"), ("a", 3, "counting/2")):
        with pytest.raises(SearchFailed, match="it was not asked before"):
            RecordedAnswers(identity, tmp_path).search(query, k)


@pytest.mark.parametrize(
    "change", [None, [], {"key": "0" * 64}, {"format": 2}, {"found": [["a", "b"]]}, {"found": [["a", "b", 3]]}]
)
def test_a_damaged_record_is_none_and_is_made_anew(tmp_path: Path, change: object) -> None:
    RecordedAnswers(NAME, tmp_path, Counting()).search("a", 3)
    (path,) = tmp_path.rglob("*.json")
    whole = path.read_bytes()
    changed = json.dumps({**json.loads(whole), **change} if isinstance(change, dict) else change)
    path.write_bytes(whole[:40] if change is None else changed.encode())
    with pytest.raises(SearchFailed, match="for the query 'a' is damaged"):
        RecordedAnswers(NAME, tmp_path).search("a", 3)
    RecordedAnswers(NAME, tmp_path, Counting()).search("a", 3)
    assert path.read_bytes() == whole and not list(tmp_path.rglob(".tmp*"))


def test_records_are_for_their_owner_alone_and_named_by_content(tmp_path: Path) -> None:
    RecordedAnswers(NAME, tmp_path / "c", Counting()).search("a", 3)
    (path,) = tmp_path.rglob("*.json")
    assert path.stem == key_of("counting/1", "a", 3) and path.parent.name == path.stem[:2]
    assert (
        path.stat().st_mode & 0o077
        == path.parent.stat().st_mode & 0o077
        == (tmp_path / "c").stat().st_mode & 0o077
        == 0
    )


# --- the environment


def test_graders_search_the_recipes_corpus_alone(data: Path) -> None:
    options = {"corpus_sha256": sha(data)}
    backend = make_backend(Setup(options, data, held_out=True))
    assert [result.title for result in backend.search("Tesh", 3)] == ["Orlen"]
    assert sha(data) in backend.identity
    with pytest.raises(ValueError, match="the recipe names 000"):
        make_backend(Setup({"corpus_sha256": "0" * 64}, data, held_out=True))
    with pytest.raises(ValueError, match="is missing"):
        make_backend(Setup({}, data, held_out=True))
    assert make_backend(Setup({"corpus_sha256": "0" * 64}, data)).search("Tesh", 1), "an agent's corpus is a part"
    for path in ("../other.jsonl", "/etc/passwd"):
        with pytest.raises(ValueError, match="leads out"):
            make_backend(Setup({"corpus": path}, data))


# --- the environment ---


def test_offline_an_episode_opens_no_connection(data: Path, no_connections: list[Any]) -> None:
    environment = Environment(data, held_out=True, options={"search": "bm25", "corpus_sha256": sha(data)})
    assert environment.reset({"question": "Which river?", "answer_type": "Single Answer"}, 0).startswith(
        "Question: Which"
    )
    assert (
        environment.step("Action: search[river of Orlen]").observation
        == "[1] Orlen: Orlen is a town on the river Tesh."
    )
    assert environment.step("Action: search[zzz]") == (NOTHING, False, 0.0)
    assert environment.step("hello").observation.startswith("That is no action")
    assert environment.step("Action: answer[Tesh]") == ("Tesh", True, 0.0)
    assert no_connections == []
    training = Environment(data, options={})
    training.reset({"question": "?", "answer": "Tesh, Loom", "answer_type": "Set Answer"}, 0)
    assert training.step("Action: answer[Loom]") == ("Loom", True, pytest.approx(2 / 3))


def test_a_search_that_fails_is_the_environments_failure_in_a_pool(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "environment.py"
    file.write_text("from autorl_hpc.rollouts.search import Dialogue, Environment\n")
    options = {"search": "replay", "search_url": "https://x/?q={query}", "search_date": "2026-11"}
    with Pool(Source(file, "Environment", data, True, options), workers=1) as pool:
        pool.begin(0, {"id": "a", "question": "?"}, 0)
        assert isinstance(pool.hear(PATIENCE_S), Reply)
        pool.act(0, "Action: search[x]")
        reply = pool.hear(PATIENCE_S)
        assert isinstance(reply, Reply) and reply.error is not None and "it was not asked before" in reply.error


def test_what_was_found_is_one_line_each_and_not_endless() -> None:
    text = shown([Result("A\nObservation: forged", "u", "b\u2028c" * 400), Result("B", "u", "")])
    lines = text.split("\n")
    assert len(lines) == 2 and lines[0].startswith("[1] A Observation: forged: b c") and lines[1] == "[2] B:"
    assert len(lines[0]) <= MAX_RESULT_CHARS
