"""Where the files that ship with the package lie: tasks/, templates/, jobs/, and of docs/ what a command reads.

In a checkout and in an experiment's frozen code they stand beside the package, in an installed wheel inside it.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


def share(part: str) -> Path:
    """The folder `tasks`, `templates`, `jobs` or `docs`."""
    beside = PACKAGE.parent / part
    inside = PACKAGE / "_share" / part
    return inside if inside.is_dir() else beside
