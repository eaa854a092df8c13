"""Which OSErrors are the file system's own, and not a statement about the file that was asked for."""

from __future__ import annotations

import errno

CLUSTER_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.ESTALE,
        errno.EROFS,
        errno.EREMOTEIO,
        errno.ENFILE,
        errno.EMFILE,
        errno.ENOMEM,
        errno.ETIMEDOUT,
        errno.EINTR,
    }
)
"""A full disk, a stale handle, no more descriptors: tried again, never charged to an agent."""


def is_cluster_error(error: OSError) -> bool:
    """Whether waiting may help."""
    return error.errno in CLUSTER_ERRNOS
