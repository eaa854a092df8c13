"""Read and write tar archives (plain, gzip or zstandard) of staged data and evidence; equal files give equal bytes.

Reading assumes a hostile archive: only plain files, and limits on header size and on unpacked bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.progress import Counted, bar
from autorl_hpc.records.exchange import StoreFile

SUFFIXES = (".tar.zst", ".tar.gz", ".tgz", ".tar")
ZSTD_MAGIC, GZIP_MAGIC = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"
TAR_MAGIC, TAR_MAGIC_AT = b"ustar", 257
ZSTD_LEVEL = 3  # higher levels gain little: weights hardly compress
MAX_WINDOW_BYTES = 128 * 1024 * 1024  # zstd's own default limit
CHUNK_BYTES = 1024 * 1024
MAX_EXTENDED_BYTES = 64 * 1024  # limit for an extended header (a long name), because tarfile reads it into memory


class DamagedArchive(Exception):
    """Report that an archive can't be read any further, and why."""


def suffix_of(path: Path) -> str:
    """Return the suffix of `SUFFIXES` that the bundle's name ends with. Raises AutorlError: it ends with none of them."""
    found = next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)
    if found is None:
        what = f"{path.name}: a bundle's name says how it is packed"
        raise AutorlError(what, where=path, next_step=f"end it with one of {', '.join(SUFFIXES)}")
    return found


def packing_of(path: Path) -> str | None:
    """Return how a file is packed, judged by its first bytes: `zst`, `gz`, `tar`, or None for anything else."""
    with open(path, "rb") as file:
        head = file.read(TAR_MAGIC_AT + len(TAR_MAGIC))
    if head.startswith(ZSTD_MAGIC):
        return "zst"
    if head.startswith(GZIP_MAGIC):
        return "gz"
    return "tar" if head[TAR_MAGIC_AT:] == TAR_MAGIC else None


def zstandard_module() -> Any:
    """Import and return the package zstandard. Raises AutorlError: it is not installed."""
    try:
        import zstandard
    except ImportError:
        what = "bundles packed by zstd need the Python package zstandard"
        advice = "pip install zstandard; or make the bundle as .tar.gz, which needs nothing"
        raise AutorlError(what, next_step=advice, exit_code=Exit.ENVIRONMENT) from None
    return zstandard


@contextmanager
def writing(raw: Any, suffix: str) -> Iterator[tarfile.TarFile]:
    """Yield a tar archive that writes to the binary stream `raw`, packed as `suffix` says."""
    with ExitStack() as stack:
        stream = raw
        if suffix == ".tar.zst":
            compressor = zstandard_module().ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True)
            stream = stack.enter_context(compressor.stream_writer(raw, closefd=False))
        elif suffix != ".tar":
            stream = stack.enter_context(gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0))
        yield stack.enter_context(tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT))


def add(archive: tarfile.TarFile, name: str, size_bytes: int, mode: int, data: Any) -> None:
    """Add a file without owner and time, so that the archive does not depend on the host."""
    row = tarfile.TarInfo(name)
    row.size, row.mode, row.mtime, row.uid, row.gid, row.uname, row.gname = size_bytes, mode, 0, 0, 0, "", ""
    with bar(f"packing {name}", size_bytes) as advance:
        archive.addfile(row, Counted(data, advance))


class Bounded:
    """Read a stream and fail after `allowed` bytes, because a small archive may unpack to any size."""

    def __init__(self, inner: Any, allowed: int) -> None:
        self.inner = inner
        self.allowed = allowed

    def read(self, size: int = -1) -> bytes:
        data: bytes = self.inner.read(size)
        self.allowed -= len(data)
        if self.allowed < 0:
            raise DamagedArchive("it holds more than it says")
        return data


class Header(tarfile.TarInfo):
    """Refuse large extended headers, which tarfile would read into memory, and sparse files."""

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        extended = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME)
        if self.type in (*extended, tarfile.GNUTYPE_LONGLINK) and self.size > MAX_EXTENDED_BYTES:
            raise DamagedArchive(f"a header of {self.size} bytes")
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise DamagedArchive("a file with holes")
        return super()._proc_member(archive)  # type: ignore[misc]


class ArchiveReader:
    """Read an archive from beginning to end: `packing` as `packing_of` returns it, at most `allowed` unpacked bytes."""

    def __init__(self, path: Path, packing: str, allowed: int) -> None:
        self._raw = open(path, "rb")  # noqa: SIM115  closed by `close`
        stream: Any = self._raw
        if packing == "gz":
            stream = gzip.GzipFile(fileobj=self._raw)
        elif packing == "zst":
            opened = zstandard_module().ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
            stream = opened.stream_reader(self._raw, read_across_frames=True)  # else only the first frame is read
        self.bound = Bounded(stream, allowed)

    def files(self) -> Iterator[tuple[str, int, IO[bytes]]]:
        """Yield name, size in bytes and data of each file; read each before the next one, all under `damage`. Raises
        DamagedArchive: there is anything but plain files, or data after the archive's end."""
        source: Any = self.bound
        archive = tarfile.open(fileobj=source, mode="r|", tarinfo=Header)  # noqa: SIM115  a stream, not a file
        while (row := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep them all
            if not row.isreg() or row.issparse():
                raise DamagedArchive(f"{row.name[:100]!r} is not a plain file")
            data = archive.extractfile(row)
            assert data is not None
            yield row.name, row.size, data
        if self.bound.read(CHUNK_BYTES).strip(b"\0"):
            raise DamagedArchive("something follows its end")

    @contextmanager
    def damage(self) -> Iterator[None]:
        """Turn every read error into DamagedArchive."""
        try:
            yield
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError, OverflowError) as error:
            raise DamagedArchive(str(error) or "it breaks off") from None
        except Exception as error:
            if type(error).__name__ == "ZstdError":
                raise DamagedArchive(str(error)) from None
            raise

    def close(self) -> None:
        self._raw.close()


class Hashed:
    """Compute the sha256 and size in bytes of a file while it is read or written."""

    def __init__(self, inner: IO[bytes]) -> None:
        self._inner = inner
        self._sha256 = hashlib.sha256()
        self.size_bytes = 0
        self.digest: Callable[[], str] = self._sha256.hexdigest

    def _count(self, data: bytes) -> None:
        self._sha256.update(data)
        self.size_bytes += len(data)

    def read(self, size: int = -1) -> bytes:
        data = self._inner.read(size)
        self._count(data)
        return data

    def write(self, data: bytes) -> int:
        self._inner.write(data)
        self._count(data)
        return len(data)

    def flush(self) -> None:
        self._inner.flush()


def write_hashed(target: Path, data: IO[bytes], row: StoreFile, said_by: str) -> None:
    """Write a file of an archive to `target`, which must not exist. Raises DamagedArchive: its hash is not that of `row`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    counted = Hashed(data)
    opened = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(opened, "wb") as file, bar(f"unpacking {target.name}", row.size_bytes) as advance:
        while chunk := counted.read(CHUNK_BYTES):
            advance(file.write(chunk))
        file.flush()
        os.fsync(file.fileno())
    if counted.digest() != row.sha256:
        raise DamagedArchive(f"{row.path} has sha256 {counted.digest()}, {said_by} says {row.sha256}")
