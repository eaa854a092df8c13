"""Downloads by other ways: no network, proxies, redirects, and https that stays https."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import downloads
import needs
import pytest
from downloads import DATA, QUICK, SHA, fails, get
from web_server import (
    LoopbackServer,
    cut,
    served,
    to,
    whole,
)

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.stage.download import NoNetwork, Pin, fetch
from autorl_hpc.stage.sources import HttpSource

server, place = downloads.server, downloads.place


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port at which nobody listens, and that nobody else gets."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "no-such-host.invalid"])
def test_a_node_without_network_says_so(server: LoopbackServer, place: Path, closed_port: int, host: str) -> None:
    url = "http://" + host.format(port=closed_port) + "/file?key=abc"
    with pytest.raises(NoNetwork, match="this node can't reach") as caught:
        fetch(HttpSource(url), place / "file", Pin(sha256=SHA), patience=QUICK)
    assert "login node" in (caught.value.next_step or "") and "--from DIR" in (caught.value.next_step or "")
    assert "abc" not in str(caught.value) and caught.value.exit_code is Exit.ENVIRONMENT
    assert not (place / "file").exists()


def test_proxies_of_the_environment_are_used(
    server: LoopbackServer, place: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url())
    server.answers["http://files.invalid/file"] = [whole(DATA)]
    fetch(HttpSource("http://files.invalid/file"), place / "file", Pin(sha256=SHA), patience=QUICK)
    assert server.seen[0][0] == "http://files.invalid/file"
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{closed_port}")
    with pytest.raises(NoNetwork):
        fetch(HttpSource("https://files.invalid/other"), place / "other", Pin(sha256=SHA), patience=QUICK)


def test_redirects_are_followed(server: LoopbackServer, place: Path) -> None:
    server.answers["/elsewhere"] = [cut(DATA, 1000), whole(DATA)]
    assert get(server, place, to(server.url("/elsewhere")))[0] == SHA
    assert [headers.get("Range") for headers in server.seen_at("/elsewhere")] == [None, "bytes=1000-"]


def test_a_redirect_in_a_circle_ends(server: LoopbackServer, place: Path) -> None:
    assert "answers 302" in fails(server, place, to(server.url("/file"))).what


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x"])
def test_a_redirect_to_something_else_is_refused(server: LoopbackServer, place: Path, url: str) -> None:
    fails(server, place, to(url))


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        needs.skip("openssl", "needs openssl for a certificate")
    made = (tmp_path / "cert.pem", tmp_path / "key.pem")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(
        [*command.split(), "-out", str(made[0]), "-keyout", str(made[1])],
        check=True,
        capture_output=True,
    )
    return made


def test_from_https_only_https_is_followed(
    server: LoopbackServer, place: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(certificate) as safe:
        safe.answers["/good"] = [whole(DATA)]
        with pytest.raises(AutorlError, match="certificate can't be verified") as caught:
            fetch(HttpSource(safe.url("/good")), place / "file", Pin(sha256=SHA), patience=QUICK)
        assert "SSL_CERT_FILE" in (caught.value.next_step or "")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        safe.answers["/to-https"] = [to(safe.url("/good"))]
        fetch(HttpSource(safe.url("/to-https")), place / "file", Pin(sha256=SHA), patience=QUICK)
        safe.answers["/to-http"] = [to(server.url("/file"))]
        server.answers["/file"] = [whole(DATA)]
        with pytest.raises(AutorlError, match="only https is followed"):
            fetch(HttpSource(safe.url("/to-http")), place / "other", Pin(sha256=SHA), patience=QUICK)
    assert not server.seen
