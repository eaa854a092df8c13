"""Base models' scores as files: `baselines/<key>.json`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.canonical import canonical_json
from autorl_hpc.records.exchange import Baseline
from autorl_hpc.records.run import Science
from autorl_hpc.states import Split


def baseline_key(science: Science, split: Split, engine_hash: str) -> str:
    """What makes two base-model scores the same measurement."""
    parts = [science.base_model_content_hash, science.splits[split].sha256, science.recipe.hash(), engine_hash]
    if (part := science.part(split)) is not None:
        parts.append(part.sha256)
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def read_baseline(folder: Path, key: str) -> Baseline | None:
    """The baseline of that key, None while there is none or it can't be read."""
    path = folder / f"{key}.json"
    try:
        if path.name not in reading.list_names(folder):
            return None
        return parse_record(Baseline, json.loads(reading.read_listed(path)), path)
    except (AutorlError, OSError, ValueError, RecursionError):
        return None
