"""numpy's BLAS with one thread: merging has threads of its own, and BLAS's would wait for each other on busy cores.

Measured on two cores with others at work on them: an adapter of rank 16 on 48 matrices of (101, 1024) was taken in within 3.1 s
with BLAS's own threads, and within 0.3 s without.
"""

from __future__ import annotations

import ctypes
import functools
import re

SETTERS = (
    "scipy_openblas_set_num_threads64_",  # numpy's wheels
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
    "MKL_Set_Num_Threads",
)


@functools.cache
def use_one_thread() -> bool:
    """Sets it for this process; False if no library that is loaded can be told so (the results are the same)."""
    import numpy  # noqa: F401  loads the library

    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = sorted({line.split(maxsplit=5)[5].strip() for line in maps if re.search(r"blas|mkl_rt", line)})
    except OSError:
        return False
    found = False
    for path in paths:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in SETTERS:
            setter = getattr(library, name, None)
            if setter is not None:
                setter.argtypes, setter.restype = [ctypes.c_int], None
                setter(1)
                found = True
    return found
