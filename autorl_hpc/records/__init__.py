"""Files on disk as typed models with a schema_version. docs/schemas/ has their JSON Schemas."""

from __future__ import annotations

import json
from typing import Any

# Records are written in two ways: canonical bytes for hashes, readable JSON for people.


def canonical_json(value: Any) -> bytes:
    """The one byte string of a JSON value that hashes are taken over: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def readable_json(value: Any) -> bytes:
    """JSON for people: indented, sorted keys, a newline at the end."""
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
