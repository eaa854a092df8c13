"""An engine on the internet, here a server of the test's own: its options, its trouble, and a key that nobody sees."""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import corpora
import pytest

from autorl_hpc.rollouts.search.backends import FOLDER, Online, Result, SearchFailed, Setup, identity_of, make_backend

no_connections, data = corpora.no_connections, corpora.data

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
