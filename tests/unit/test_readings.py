"""Other containers and codes for held-out text, and what is said of bytes that nobody can read."""

from __future__ import annotations

import base64
import gzip
import io
import lzma
import os
import quopri
import shutil
import subprocess
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, quote_plus

import needs
import pytest
from test_ngrams import LONG, TEXTS, found, in_a_zip, meter, scanner

from autorl_hpc.states import Split
from autorl_hpc.supervise.ngrams import readings, wide_code
from autorl_hpc.supervise.plaintext import opaque_bytes


def behind_a_line(text: str) -> bytes:
    """What zipapp makes."""
    return b"#!/usr/bin/env python3\n" + in_a_zip(text)


def before_a_zip(text: str) -> bytes:
    return text.encode() + b"\n" + in_a_zip("nothing")


def in_a_comment(text: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a", "nothing")
        archive.comment = text.encode()
    return out.getvalue()


def numbered(text: str) -> bytes:
    return "\n".join(f"{n} {word}" for n, word in enumerate(text.split())).encode()


WAYS: dict[str, Callable[[str], bytes]] = {
    **{
        f"zlib at level {level}": lambda text, level=level: zlib.compress(text.encode(), level)  # type: ignore[misc]
        for level in (1, 4, 6, 9)
    },
    "zlib with a small window": lambda text: zlib.compress(text.encode(), wbits=9),
    "text after zlib": lambda text: zlib.compress(b"nothing") + text.encode(),
    "text after gzip": lambda text: gzip.compress(b"nothing") + text.encode(),
    "text that begins like gzip": lambda text: b"\x1f\x8b " + text.encode(),
    "text that begins like zlib": lambda text: b"x\x9c " + text.encode(),
    "lzma of old": lambda text: lzma.compress(text.encode(), lzma.FORMAT_ALONE),
    "zip behind a line": behind_a_line,
    "text before a zip": before_a_zip,
    "a zip's comment": in_a_comment,
    "utf-16-le": lambda text: text.encode("utf-16-le"),
    "utf-16-be": lambda text: text.encode("utf-16-be"),
    "utf-32 with a mark": lambda text: text.encode("utf-32"),
    "utf-32-le": lambda text: text.encode("utf-32-le"),
    "utf-32-be": lambda text: text.encode("utf-32-be"),
    "text behind a mark of utf-16": lambda text: b"\xff\xfe" + text.encode(),
    "percent": lambda text: quote(text).encode(),
    "a form": lambda text: quote_plus(text).encode(),
    "quoted-printable": lambda text: quopri.encodestring(text.encode()),
    "a numbered word a line": numbered,
    "cat -n": lambda text: "".join(f"{n:6}\t{word}\n" for n, word in enumerate(text.split())).encode(),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_code_is_undone(way: str, tmp_path: Path) -> None:
    for text in TEXTS:
        (tmp_path / "file").write_bytes(WAYS[way](text))
        look = scanner(tmp_path).look(meter())
        assert [line.first_items for line in look.found] == [(f"i{TEXTS.index(text)}",)], text
        assert look.found[0].how == "exact" and look.found[0].file == "file"


@pytest.mark.slow
def test_wide_letters_anywhere_in_a_large_file(tmp_path: Path) -> None:
    for code in ("utf-16-le", "utf-16-be", "utf-32-le"):
        for before in (b"", b"x"):
            filler = b"plain words " * 150_000
            (tmp_path / "file").write_bytes(filler + before + LONG.encode(code) + filler)
            assert found(tmp_path) == 1, code
            (tmp_path / "file").write_bytes(before + ((LONG + " and more ") * 8000).encode(code))
            assert found(tmp_path) == 1, code


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


def test_names_are_text_too(tmp_path: Path) -> None:
    def look(folder: Path) -> list[tuple[str, int]]:
        return [(line.file, line.items) for line in scanner(folder).look(meter()).found]

    (tmp_path / "one").mkdir()
    (tmp_path / "one" / LONG.replace("/", "_")).touch()
    assert look(tmp_path / "one") == [("./", 1)]
    (tmp_path / "folder" / LONG).mkdir(parents=True)
    assert look(tmp_path / "folder") == [("./", 1)]
    (tmp_path / "words").mkdir()
    for n, word in enumerate(LONG.split()):
        (tmp_path / "words" / f"{n} {word}").touch()
    assert look(tmp_path / "words") == [("./", 1)]
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "a").symlink_to(LONG)
    assert look(tmp_path / "link") == [("./", 1)]


@pytest.mark.parametrize("folder", ["submissions", "results"])
def test_the_suites_own_folders_are_looked_at(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "strange.txt").write_text(LONG)
    assert [line.file for line in scanner(tmp_path).look(meter()).found] == [f"{folder}/strange.txt"]


def test_what_was_given_is_not_looked_for_in_any_code(tmp_path: Path) -> None:
    """A training set with numbered lines, copied as it stands."""
    text = numbered(LONG)
    (tmp_path / "file").write_bytes(text)
    eye = scanner(tmp_path)
    assert eye.look(meter()).items == {Split.REPORT: 1}
    eye = scanner(tmp_path)
    for part in readings(text):
        eye.heldout.index.forget(eye.heldout.index.search(part))
    assert eye.look(meter()).items == {Split.REPORT: 0}


def test_bytes_that_cannot_be_read_are_skipped_bytes(tmp_path: Path) -> None:
    secret = os.urandom(300_000)
    (tmp_path / "sealed.bin").write_bytes(secret)
    (tmp_path / "notes.txt").write_text("words " * 1000)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"other words " * 1000))
    eye = scanner(tmp_path)
    look = eye.look(meter())
    assert (look.files_scanned, look.files_skipped, look.bytes_skipped) == (2, 1, len(secret))
    assert look.bytes_scanned == 6000 + 12_000 and look.complete
    again = eye.look(meter())
    assert (again.files_skipped, again.bytes_skipped, again.bytes_scanned) == (1, len(secret), 0)
    assert again.bytes_unchanged == 6000 + (tmp_path / "packed.gz").stat().st_size


def test_one_archive_in_another_is_said_to_be_skipped(tmp_path: Path) -> None:
    many = gzip.compress("".join(f"{LONG} {n * 7919}\n" for n in range(2000)).encode(), 1)
    (tmp_path / "file").write_bytes(gzip.compress(many))
    look = scanner(tmp_path).look(meter())
    assert look.items == {Split.REPORT: 0} and look.bytes_skipped > 0.9 * (tmp_path / "file").stat().st_size


@pytest.mark.parametrize(
    ("data", "share"),
    [
        (b"plain text " * 1000, 0.0),
        ("中文的句子没有空格".encode() * 1000, 0.0),
        ("caf\u00e9 na\u00efve ".encode("utf-16-le") * 1000, 0.0),
        (bytes(100_000), 0.0),
        (base64.b64encode(os.urandom(30_000)), 0.0),
        (os.urandom(40_960), 1.0),
        (zlib.compress(os.urandom(40_960)), 1.0),
        (b"plain text in rows of tables " * 1000 + os.urandom(29_000), 0.5),
    ],
    ids=["text", "chinese", "utf-16", "zeros", "base64", "random", "zlib", "half"],
)
def test_opaque_bytes(data: bytes, share: float) -> None:
    assert opaque_bytes(data) == pytest.approx(share * len(data), abs=2 * 4096)


def test_readings_of_plain_text_are_the_text_alone() -> None:
    for text in (b"a = b % c; x = 20", b"one\ntwo\n", b"50% of 20%", b"\0" * 5, b""):
        assert list(readings(text)) == [text]
    assert wide_code(bytes(400)) is None and wide_code(os.urandom(4000)) is None
