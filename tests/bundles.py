"""Exported runs taken apart and put together again, as somebody would who wants to be believed."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

from autorl_hpc.files.archive import add, writing
from autorl_hpc.records import canonical_json

Files = dict[str, bytes]
HEAD = "EVIDENCE.json"


def read_bundle(path: Path) -> Files:
    data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(path.read_bytes())).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {row.name: archive.extractfile(row).read() for row in archive}  # type: ignore[union-attr]


def write_bundle(path: Path, files: Files, *, describe: bool = True, **head: Any) -> Path:
    """A bundle of these files.

    Args:
        describe: let EVIDENCE.json give them as they are now.
        head: other fields of it.
    """
    manifest = json.loads(files[HEAD])
    rest = {name: data for name, data in sorted(files.items()) if name != HEAD}
    if describe:
        manifest["files"] = [
            {"path": name, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
            for name, data in rest.items()
        ]
    with open(path, "wb") as raw, writing(raw, ".tar.zst") as archive:
        for name, data in {HEAD: json.dumps(manifest | head).encode(), **rest}.items():
            add(archive, name, len(data), 0o444, io.BytesIO(data))
    return path


def entries_of(files: Files) -> list[str]:
    return sorted(name for name in files if "/ledger/" in name)


def forge(files: Files, change: Callable[[dict[str, Any]], None]) -> Files:
    """The same run with other entries, everything linked, copied and named anew.

    Args:
        change: is given each entry, to change it.
    """
    files = dict(files)
    names = entries_of(files)
    run = names[0].split("/ledger/")[0]
    prev = hashlib.sha256(files[f"{run}/run.json"]).hexdigest()
    for name in names:
        entry = json.loads(files[name])
        change(entry)
        files[name] = canonical_json({**entry, "prev": prev}) + b"\n"
        prev = hashlib.sha256(files[name]).hexdigest()
    files[f"{run}/ledger.jsonl"] = b"".join(files[name] for name in names)
    files.pop(f"{run}/report/summary.json", None)
    head = json.loads(files[HEAD])
    head["head"] |= {"head": prev, "entries": len(names)}
    files[HEAD] = json.dumps(head).encode()
    return files


def solved(items: bytes, count: int, *, other_texts: bool = False) -> bytes:
    """An items file with the first `count` items solved, and no other."""
    rows = [json.loads(line) for line in gzip.decompress(items).splitlines()]
    for place, row in enumerate(rows):
        was, row["outcome"] = row["outcome"], float(place < count)
        if other_texts and was != row["outcome"]:
            row["output_sha256"] = hashlib.sha256(f"{place}".encode()).hexdigest()
    return gzip.compress(b"".join(canonical_json(row) + b"\n" for row in rows), mtime=0)
