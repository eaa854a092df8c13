"""Files out of the page cache, and the proof that they are."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

PAGE = mmap.PAGESIZE


def forget(folder: Path) -> float:
    """Asks the kernel to drop the pages of the safetensors files in `folder`; the share of them that stayed, 0 to 1."""
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if _resident(paths) > 0.01:
        try:  # another file system may heed this alone; root's
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
        except OSError:
            pass
    return _resident(paths)


def _resident(paths: list[Path]) -> float:
    """The share of the files' pages that are in memory, by mincore(2); 1 where that can't be told."""
    pages = held = 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_ubyte)]
    for path in paths:
        size = path.stat().st_size
        if not size:
            continue
        with open(path, "rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as view:
            count = (size + PAGE - 1) // PAGE
            found = (ctypes.c_ubyte * count)()
            anchor = ctypes.c_ubyte.from_buffer(view)
            try:
                if libc.mincore(ctypes.addressof(anchor), size, found):
                    return 1.0
            finally:
                del anchor
            pages += count
            held += sum(byte & 1 for byte in found)
    return held / pages if pages else 1.0
