"""What a download reads before and between its bytes: addresses, headers of an answer, how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import formatdate

import pytest

from autorl_hpc.errors import AutorlError
from autorl_hpc.stage.download import range_start, range_total, retry_after_s
from autorl_hpc.stage.sources import address_of, hub_file

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("hf://org/name@v1/a b.json", "https://huggingface.co/org/name/resolve/v1/a%20b.json"),
        (
            f"hf://datasets/org/name@{COMMIT}/d/x.csv",
            f"https://huggingface.co/datasets/org/name/resolve/{COMMIT}/d/x.csv",
        ),
        ("https://host/x?y=1", "https://host/x?y=1"),
        ("https://github.com/o/r/blob/abc/d/x.json", "https://raw.githubusercontent.com/o/r/abc/d/x.json"),
        ("https://github.com/o/r/releases/download/v1/x.zip", "https://github.com/o/r/releases/download/v1/x.zip"),
        ("https://github.com/o/r", None),
        ("https://github.com/o/r/tree/abc/d", None),
        ("https://github.com/o/r/blob/abc/x.py (through bin/make)", None),
        ("the web page of the authors", None),
        ("ftp://host/x", None),
    ],
)
def test_addresses(text: str, url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    found = address_of(text)
    assert (found.url if found else None) == url
    assert found is None or found.hub == ("huggingface" in found.url)


@pytest.mark.parametrize(
    "text",
    [
        "hf://name@v1/x",
        "hf://org/name/x",
        "hf://org/name@/x",
        "hf://org/name@v1/../../x",
        "hf://org/name@a/b/c/..",
        "https://u:p@h/x",
    ],
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(AutorlError) as caught:
        address_of(text)
    assert "u:p" not in str(caught.value) and caught.value.next_step


def test_a_mirror_stands_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hub/")
    assert hub_file("org/m", "v1", "x").url == "https://mirror.example/hub/org/m/resolve/v1/x"
    monkeypatch.setenv("HF_ENDPOINT", "mirror.example")
    with pytest.raises(AutorlError, match="HF_ENDPOINT is no address"):
        hub_file("org/m", "v1", "x")


@pytest.mark.parametrize(
    ("value", "seconds"), [(None, None), ("5", 5.0), ("-3", 0.0), ("soon", None), ("", None), ("nan", 0.0)]
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value) == seconds


def test_retry_after_as_a_date() -> None:
    found = retry_after_s(formatdate(time.time() + 100, usegmt=True))
    assert found is not None and 90 < found < 101
    assert retry_after_s(formatdate(0, usegmt=True)) == 0.0


@pytest.mark.parametrize(
    ("value", "start", "total"),
    [
        ("bytes 5-9/10", 5, 10),
        ("bytes */10", None, 10),
        ("bytes 5-9/*", 5, None),
        ("", None, None),
        ("bytes x-y/z", None, None),
    ],
)
def test_content_range(value: str, start: int | None, total: int | None) -> None:
    assert (range_start(value), range_total(value)) == (start, total)


def test_progress_in_a_log_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    from autorl_hpc.stage import sources

    lines: list[str] = []
    monkeypatch.setattr(sources, "LINE_EVERY_S", 0.0)
    shown: Callable[[int, int | None], None]
    with sources.progress("file", lines.append) as shown:
        shown(1500, 3000)
        shown(2_000_000, None)
    assert lines == ["file: 1.5 kB of 3.0 kB (50 %)", "file: 2.0 MB"]
