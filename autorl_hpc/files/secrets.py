"""Which environment variables are secrets: what is left out of jobs, and where a process starts that has to
do with models' texts or weights."""

from __future__ import annotations

import re
from collections.abc import Mapping

SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|KEY|JWT", re.IGNORECASE)
"""SLURM_JWT is a user's whole access to the scheduler."""


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names don't look like a secret's."""
    return {name: value for name, value in environ.items() if not SECRET.search(name)}
