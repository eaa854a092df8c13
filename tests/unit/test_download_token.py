"""The Hub's token goes nowhere else and stands in no message."""

from __future__ import annotations

from pathlib import Path

import downloads
import pytest
from downloads import DATA, QUICK, SHA
from web_server import (
    Answer,
    LoopbackServer,
    code,
    served,
    to,
    whole,
)

from autorl_hpc.errors import AutorlError
from autorl_hpc.stage.download import Pin, fetch
from autorl_hpc.stage.sources import HttpSource, address_of, hub_file, hub_token

server, place = downloads.server, downloads.place

SECRET = "hf_secretsecretsecret"


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: LoopbackServer) -> Path:
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    monkeypatch.setenv("HF_TOKEN_PATH", str(path))
    monkeypatch.setenv("HF_ENDPOINT", server.url())
    return path


def gated(then: Answer) -> Answer:
    def answer(handler: object) -> None:
        if handler.headers.get("Authorization") == f"Bearer {SECRET}":  # type: ignore[attr-defined]
            then(handler)  # type: ignore[arg-type]
        else:
            handler.plain(401, b"who are you")  # type: ignore[attr-defined]

    return answer


def test_a_gated_file_is_had_with_the_token_and_no_other_host_sees_it(
    server: LoopbackServer, token: Path, place: Path
) -> None:
    with served() as cdn:
        cdn.answers["/blob"] = [whole(DATA)]
        server.answers["/org/m/resolve/v1/w"] = [gated(to(server.url("/here")))]
        server.answers["/here"] = [gated(to(cdn.url("/blob")))]
        fetch(hub_file("org/m", "v1", "w"), place / "file", Pin(sha256=SHA), patience=QUICK)
        assert [path for path, _ in cdn.seen] == ["/blob"]
        assert not any("authorization" in name.lower() for _, headers in cdn.seen for name in headers)
        assert not any(SECRET in value for _, headers in cdn.seen for value in headers.values())
    asked = [headers.get("Authorization") for headers in server.seen_at("/org/m/resolve/v1/w")]
    assert asked == [None, f"Bearer {SECRET}"], "it is shown once it is asked for"


def test_an_open_file_is_had_without_the_token(server: LoopbackServer, token: Path, place: Path) -> None:
    server.answers["/org/m/resolve/v1/w"] = [whole(DATA)]
    fetch(hub_file("org/m", "v1", "w"), place / "file", Pin(sha256=SHA), patience=QUICK)
    assert "Authorization" not in server.seen[0][1]


def test_other_servers_are_not_shown_the_token(server: LoopbackServer, token: Path, place: Path) -> None:
    with served() as other:
        other.answers["/file"] = [code(401)]
        with pytest.raises(AutorlError, match="answers 401"):
            fetch(address_of(other.url("/file")) or HttpSource(""), place / "file", Pin(sha256=SHA), patience=QUICK)
        assert len(other.seen) == 1 and "Authorization" not in other.seen[0][1]


def test_a_refused_token_stands_in_no_message(server: LoopbackServer, token: Path, place: Path) -> None:
    server.answers["/org/m/resolve/v1/w"] = [code(403)]
    lines: list[str] = []
    with pytest.raises(AutorlError, match="gated and your token doesn't open it") as caught:
        fetch(hub_file("org/m", "v1", "w"), place / "file", Pin(sha256=SHA), say=lines.append, patience=QUICK)
    assert SECRET not in f"{caught.value}{caught.value.as_json()}{lines}"
    assert len(server.seen) == 2


@pytest.mark.parametrize("content", ["", "two words", "a\nb", "é", "x" * 5000])
def test_a_token_file_that_holds_something_else(token: Path, content: str) -> None:
    token.write_text(content)
    with pytest.raises(AutorlError, match="must hold the token alone") as caught:
        hub_token()
    assert caught.value.where == str(token) and (not content or content not in str(caught.value))


def test_a_token_file_that_is_not_there(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token.unlink()
    with pytest.raises(AutorlError, match="can't be read"):
        hub_token()
    monkeypatch.delenv("HF_TOKEN_PATH")
    assert hub_token() is None
