"""Where the repository lies, and the tasks' public data."""

from __future__ import annotations

import os
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def real_data() -> Path | None:
    """The folder with the tasks' public data: $AUTORL_TEST_DATA, else ../shared/data beside the checkout."""
    for candidate in (os.environ.get("AUTORL_TEST_DATA"), REPO.parent / "shared" / "data"):
        if candidate and Path(candidate).is_dir():
            return Path(candidate)
    return None
