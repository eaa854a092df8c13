"""What counts as a held-out text, and what is read of a workspace that wants to be hard to read."""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import socket
import subprocess
import sys
import time
import unicodedata
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import needs
import pytest

from autorl_hpc.records.entries import Contamination
from autorl_hpc.states import Split
from autorl_hpc.supervise import plaintext
from autorl_hpc.supervise.ngrams import NgramIndex, Text, readings
from autorl_hpc.supervise.plaintext import ReadingBudget, TooMuch, chunks, readable
from autorl_hpc.supervise.scanner import FileContent, Heldout, Scanner

LONG = (
    "Janet\u2019s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for her friends "
    "every day with four. How much does she make?"
)
SHORT = "In which town was the founder of Rudd Glassworks born?"
LATEX = (
    "Let $\\frac{x}{\\sqrt{2}} = \\nu$ and \\times\nthe sum of all \u4e2d\u6587 na\u00efve \U0001d465 "
    "values with twelve more words that follow here be found."
)
TEXTS = [LONG, SHORT, LATEX]


def scanner(folder: Path, texts: list[str] = TEXTS, given: str = "") -> Scanner:
    """A scanner over `folder` with these questions held out."""
    index = NgramIndex([Text(n, text, asked=True) for n, text in enumerate(texts)], len(texts))
    index.forget(index.search(given.encode()))
    heldout = Heldout(index, [Split.REPORT] * len(texts), [f"i{n}" for n in range(len(texts))])
    return Scanner(heldout, 0, folder, folder / "no-log")


def meter(seconds: float = 200.0, count: int = 1 << 30) -> ReadingBudget:
    return ReadingBudget(time.monotonic() + seconds, count, inflated_bytes=4 << 20)


def found(folder: Path, texts: list[str] = TEXTS) -> int:
    """How many of the texts one look finds."""
    return sum(scanner(folder, texts).look(meter()).items.values())


def in_a_notebook(text: str) -> bytes:
    lines = [line + "\n" for line in text.replace(". ", ".\n").split("\n")]
    return json.dumps({"cells": [{"cell_type": "code", "source": lines}]}, indent=1).encode()


def in_a_zip(text: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("deep/down.txt", text)
    return out.getvalue()


def in_a_comment(text: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a", "nothing")
        archive.comment = text.encode()
    return out.getvalue()


def numbered(text: str) -> bytes:
    return "\n".join(f"{n} {word}" for n, word in enumerate(text.split())).encode()


WAYS: dict[str, Callable[[str], bytes]] = {
    "copied": str.encode,
    "decomposed": lambda text: unicodedata.normalize("NFD", text).encode(),
    "re-wrapped, as a comment": lambda text: text.replace(" ", "\n   # ").encode(),
    "json in json, escaped twice": lambda text: json.dumps({"row": json.dumps({"q": text})}).encode(),
    "json without ascii": lambda text: json.dumps({"q": text}, ensure_ascii=False).encode(),
    "html entities": lambda text: text.replace("\u2019", "&#8217;").replace("$", "&#36;").encode(),
    "a notebook": in_a_notebook,
    "zero-width signs in words": lambda text: text.replace("a", "a\u200b").encode(),
    "between bytes that are no text": lambda text: b"\x80\x04\x95\0\0" + text.encode() + b"\x94\x8c\xff\0",
    "utf-16 with a mark": lambda text: text.encode("utf-16"),
    "text behind a mark of utf-16": lambda text: b"\xff\xfe" + text.encode(),
    "gzip in two members": lambda text: gzip.compress(b"first ") + gzip.compress(text.encode()),
    "xz": lambda text: lzma.compress(text.encode()),
    "lzma of old": lambda text: lzma.compress(text.encode(), lzma.FORMAT_ALONE),
    "bzip2": lambda text: bz2.compress(text.encode()),
    "zlib": lambda text: zlib.compress(text.encode(), 1),
    "zip": in_a_zip,
    "zip behind a line": lambda text: b"#!/usr/bin/env python3\n" + in_a_zip(text),
    "text before a zip": lambda text: text.encode() + b"\n" + in_a_zip("nothing"),
    "a zip's comment": in_a_comment,
    "text after gzip": lambda text: gzip.compress(b"nothing") + text.encode(),
    "text after zlib": lambda text: zlib.compress(b"nothing") + text.encode(),
    "text that begins like gzip": lambda text: b"\x1f\x8b " + text.encode(),
    "a numbered word a line": numbered,
    "cat -n": lambda text: "".join(f"{n:6}\t{word}\n" for n, word in enumerate(text.split())).encode(),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_writing_a_text_down_is_seen_through(way: str, tmp_path: Path) -> None:
    for text in TEXTS:
        (tmp_path / "file").write_bytes(WAYS[way](text))
        look = scanner(tmp_path).look(meter())
        assert [line.first_items for line in look.found] == [(f"i{TEXTS.index(text)}",)], text
        assert look.found[0].how == "exact" and look.found[0].file == "file"


@pytest.mark.parametrize("code", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_wide_latin_text_is_seen_without_a_mark(code: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LONG.encode(code))
    assert found(tmp_path) == 1


UNSEEN: dict[str, Callable[[str], bytes]] = {
    "paraphrased": lambda text: b"Every day the ducks of Janet give her sixteen eggs; three she has in the morning.",
    "base64": lambda text: base64.b64encode(text.encode()),
    "percent": lambda text: quote(text).encode(),
    "reversed": lambda text: text[::-1].encode(),
    "every fifth word changed": lambda text: " ".join(
        "x" if n % 5 == 0 else word for n, word in enumerate(text.split())
    ).encode(),
    "gzip in gzip": lambda text: gzip.compress(gzip.compress(text.encode())),
}


@pytest.mark.parametrize("way", UNSEEN)
def test_what_the_docs_call_unseen_is_unseen(way: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(UNSEEN[way](LONG))
    assert found(tmp_path) == 0


def test_thirteen_words_in_a_row_are_needed(tmp_path: Path) -> None:
    parts = LONG.split()
    (tmp_path / "file").write_text(" ".join(parts[3:15]))  # twelve
    assert found(tmp_path) == 0
    (tmp_path / "file").write_text(" ".join(parts[3:16]))
    look = scanner(tmp_path).look(meter())
    assert [line.how for line in look.found] == ["ngram"] and look.whole == {Split.REPORT: 0}


def test_runs_of_numbers_and_letters_say_nothing(tmp_path: Path) -> None:
    digits = "1 2 3 4 5 6 7 8 9 A B C D E F"
    (tmp_path / "file").write_text(f"DIGITS = '{digits}'")
    assert found(tmp_path, [f"You are given a string of hexadecimal digits, one of {digits}, and count primes."]) == 0
    assert scanner(tmp_path, [digits]).look(meter()).too_short == 1


def test_a_short_text_must_be_whole_and_a_shorter_one_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("put a clean cup on shelf. " + SHORT.removesuffix(" born?"))
    look = scanner(tmp_path, [SHORT, "put a clean cup on shelf."]).look(meter())
    assert look.items == {Split.REPORT: 0} and look.of == {Split.REPORT: 1} and look.too_short == 1
    (tmp_path / "file").write_text(SHORT.upper())
    assert found(tmp_path) == 1


def test_answers_count_from_26_words_on_and_by_half(tmp_path: Path) -> None:
    answer = " ".join(f"word{n}" for n in range(40))  # 28 runs
    index = NgramIndex([Text(0, "too short to tell", asked=True), Text(0, answer, asked=False)], 1)
    for count, expected in ((12, {}), (13 + 12, {}), (13 + 13, {0: "ngram"}), (40, {0: "exact"})):
        text = " ".join(answer.split()[:count])
        assert index.found(index.search(text.encode())) == expected, count
    assert NgramIndex([Text(0, " ".join(answer.split()[:25]), asked=False)], 1).short == 1


def test_what_was_given_is_not_looked_for_in_any_code(tmp_path: Path) -> None:
    shared = "the quick brown fox jumps over the lazy dog and runs far away"
    first, second = f"{shared} one more", f"{shared} two more"
    (tmp_path / "file").write_text(first)
    look = scanner(tmp_path, [first, second]).look(meter())
    assert look.items == {Split.REPORT: 2}  # both share a run
    look = scanner(tmp_path, [first, second], given=f"Example: {shared}.").look(meter())
    assert look.items == {Split.REPORT: 1}
    look = scanner(tmp_path, [first, second], given=first).look(meter())
    assert look.items == {Split.REPORT: 0} and look.of == {Split.REPORT: 1}
    # A training set with numbered lines, copied as it stands.
    text = numbered(LONG)
    (tmp_path / "file").write_bytes(text)
    eye = scanner(tmp_path)
    assert eye.look(meter()).items == {Split.REPORT: 1}
    eye = scanner(tmp_path)
    for part in readings(text):
        eye.heldout.index.forget(eye.heldout.index.search(part))
    assert eye.look(meter()).items == {Split.REPORT: 0}


def test_a_run_across_the_border_of_two_chunks_is_found(tmp_path: Path) -> None:
    for shift in (37, len(LONG)):
        filler = b"x " * (plaintext.CHUNK_BYTES // 2 - shift // 2)
        whole = filler + LONG.encode() + b" y" * 6_000
        for data in (whole, b"x" + whole.decode().encode("utf-16-le")):
            (tmp_path / "file").write_bytes(data)
            assert found(tmp_path) == 1, (shift, data[:4])


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@x")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@needs.needs("git", shutil.which("git") is not None, "no git")
def test_a_file_that_is_gone_but_in_git(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", ".")
    for name, text in (("a.txt", LONG), ("b.txt", TEXTS[2]), ("c.txt", "other words " * 500)):
        (tmp_path / name).write_text(text)
        git(tmp_path, "add", name)
        git(tmp_path, "commit", "-qm", name)
        (tmp_path / name).unlink()
    look = scanner(tmp_path).look(meter())
    assert look.items == {Split.REPORT: 2} and look.complete


# ---------------------------------------------------------------- a workspace that wants to be hard to read


def test_links_fifos_sockets_and_unreadable_files_are_passed_by(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text(LONG)
    work = tmp_path / "work"
    work.mkdir()
    (work / "link.txt").symlink_to(outside / "secret.txt")
    (work / "folder").symlink_to(outside)
    (work / "loop").symlink_to(".")
    os.mkfifo(work / "fifo.txt")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(work / "socket"))
        look = scanner(work).look(meter())
    assert look.items == {Split.REPORT: 0} and look.files_scanned == 0 and look.complete


BOMBS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "zip": lambda data: in_a_zip(data.decode()),
}


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.slow
def test_a_bomb_is_cut_off_and_the_next_file_is_read(kind: str, tmp_path: Path) -> None:
    (tmp_path / f"a.{kind}").write_bytes(BOMBS[kind](b"boom " * (3 << 20)))
    (tmp_path / "z.txt").write_text(LONG)
    look = scanner(tmp_path).look(meter())
    assert look.items == {Split.REPORT: 1}
    assert not look.complete and look.reason is not None and "more than 4 MiB" in look.reason
    assert look.bytes_scanned < 8 << 20


def test_a_zip_with_a_huge_directory_is_not_opened(tmp_path: Path) -> None:
    end = b"PK\5\6" + b"\0" * 4 + (5).to_bytes(2, "little") * 2 + (1 << 30).to_bytes(4, "little") + b"\0" * 6
    (tmp_path / "a.zip").write_bytes(b"PK\3\4" + b"\0" * 100 + end)
    fd = os.open(tmp_path / "a.zip", os.O_RDONLY)
    with pytest.raises(TooMuch):
        list(chunks(fd, meter()))
    os.close(fd)


def test_limits_of_files_bytes_and_seconds_are_said(tmp_path: Path) -> None:
    for n in range(30):
        (tmp_path / f"{n:02}.txt").write_text("some text " * 2000)
    look = scanner(tmp_path).look(meter(count=100_000))
    assert not look.complete and look.reason == "limit of the look: bytes"
    assert look.files_skipped >= 24 and look.bytes_skipped >= 24 * 20_000
    look = scanner(tmp_path).look(meter(seconds=-1))
    assert not look.complete and look.reason == "limit of the look: time"
    eye = scanner(tmp_path)
    eye.max_files = 10
    look = eye.look(meter())
    assert look.files_scanned == 10 and look.reason == "not all folders could be listed"


@pytest.mark.parametrize(
    ("data", "share"),
    [
        (b"plain text " * 1000, 0.0), ("中文的句子没有空格".encode() * 1000, 0.0),
        ("caf\u00e9 na\u00efve ".encode("utf-16-le") * 1000, 0.0), (bytes(100_000), 0.0),
        (base64.b64encode(os.urandom(30_000)), 0.0), (os.urandom(40_960), 1.0),
        (zlib.compress(os.urandom(40_960)), 1.0),
        (b"plain text in rows of tables " * 1000 + os.urandom(29_000), 0.5),
    ],
    ids=["text", "chinese", "utf-16", "zeros", "base64", "random", "zlib", "half"],
)  # fmt: skip
def test_what_is_not_text_is_told(data: bytes, share: float) -> None:
    assert readable(data)[1] == pytest.approx(share * len(data), abs=2 * 4096)


def test_names_and_links_are_text_too(tmp_path: Path) -> None:
    def look(name: str) -> list[tuple[str, int]]:
        return [(line.file, line.items) for line in scanner(tmp_path / name).look(meter()).found]

    (tmp_path / "folder" / LONG).mkdir(parents=True)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "a").symlink_to(LONG)
    assert look("folder") == look("link") == [("./", 1)]


def test_a_sparse_giant_costs_nothing_and_its_text_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "giant.txt", "wb") as file:
        file.write(b"text " * 20_000)
        file.seek(400 << 20)
        file.write(LONG.encode() + b" text" * 20_000)
    look = scanner(tmp_path).look(meter())
    assert look.items == {Split.REPORT: 1} and look.bytes_scanned < 4 << 20


def test_files_are_read_again_only_when_they_changed_and_what_is_not_read_is_told(tmp_path: Path) -> None:
    """Scan with a new scanner, given the state of the one before."""
    known: str = "[]"

    def look() -> Contamination:
        nonlocal known
        eye = scanner(tmp_path)
        eye.known = {tuple(identity): FileContent(*content) for identity, content in json.loads(known)}
        answer = eye.look(meter())
        known = json.dumps(list(eye.known.items()))
        return answer

    header = json.dumps({"w": {"dtype": "F32", "shape": [1]}}).encode().ljust(30_000)
    weights = len(header).to_bytes(8, "little") + header + os.urandom(5 << 20)
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "sealed.bin").write_bytes(os.urandom(300_000))
    (tmp_path / "packed.gz").write_bytes(gzip.compress(LONG.encode() + b" other words" * 1000))
    (tmp_path / "b.txt").write_text("nothing here")
    first, again = look(), look()
    assert first.items == again.items == {Split.REPORT: 1} and first.found == again.found and first.complete
    for one in (first, again):
        assert (one.files_skipped, one.bytes_skipped) == (2, len(weights) + 300_000)
    assert first.files_scanned == 2 and first.bytes_scanned == len(LONG.encode()) + 12_000 + 12
    assert again.bytes_scanned == 0 and again.bytes_unchanged == (tmp_path / "packed.gz").stat().st_size + 12
    times = (tmp_path / "b.txt").stat()
    (tmp_path / "b.txt").write_text("NOTHING HERE")  # the same size, and the old mtime
    os.utime(tmp_path / "b.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "packed.gz").unlink()
    third = look()
    assert third.bytes_scanned == 12 and third.items == {Split.REPORT: 0}


def test_names_are_escaped_and_the_list_is_bounded(tmp_path: Path) -> None:
    for n in range(30):
        (tmp_path / f"\x1b[31m{n}").write_text(LONG)
    look = scanner(tmp_path).look(meter())
    assert len(look.found) == 20 and look.found_unlisted == 10 and look.items == {Split.REPORT: 1}
    assert all("\x1b" not in line.file for line in look.found)


@pytest.mark.parametrize("refused", ["inside.txt", "no-log"])
def test_a_look_that_was_refused_a_file_is_not_complete(tmp_path: Path, refused: str) -> None:
    """Catches a look that calls itself complete, or gives up all other files, where one can't be opened: here it is under a lease."""
    (tmp_path / "other.txt").write_text(LONG)
    (tmp_path / refused).write_text(SHORT)
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / refused)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.read(1) == b"x"
        seen = scanner(tmp_path).look(meter())
    finally:
        holder.kill()
        holder.wait()
    assert not seen.complete and "can't be read" in (seen.reason or "") and sum(seen.items.values()) == 1


HOLDS = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
os.write(1, b"x")
time.sleep(600)
"""
