"""Where everything lies in an exported run: below `experiment/` as in an experiment's folder, so that the same code reads it."""

from __future__ import annotations

import re

MANIFEST_NAME = "EVIDENCE.json"
EXPERIMENT = "experiment"
TASK = "task"
TASK_FILE, RECIPE_FILE = f"{TASK}/task.yaml", f"{TASK}/recipe.json"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,239}")
_HEX = "[0-9a-f]{64}"


def is_run_id(text: str) -> bool:
    """Whether it may be the name of a folder, and not that of another one of ours."""
    return RUN_ID.fullmatch(text) is not None and text not in ("artifacts", "baselines", "experiment.json")


def is_weights(name: str, content_hash: str | None) -> bool:
    """Whether a file of a bundle is one of the selected checkpoint's."""
    folder = f"{EXPERIMENT}/artifacts/{content_hash}/"
    return bool(
        content_hash
        and name.startswith(folder)
        and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors", name.removeprefix(folder))
    )


def is_record(name: str, run_id: str) -> bool:
    """Whether a file of a bundle is one of the records that a bundle may hold. Every name is spelled out: none leads away."""
    inside = r"run\.json|ledger\.jsonl|ledger/[0-9]{6}\.json|items/[0-9]{6}\.(feedback|report)\.jsonl\.gz|report/summary\.json"
    patterns = (
        rf"{EXPERIMENT}/experiment\.json",
        rf"{EXPERIMENT}/{re.escape(run_id)}/({inside})",
        rf"{EXPERIMENT}/baselines/{_HEX}(\.json|\.items\.jsonl\.gz)",
        rf"{TASK}/(task\.yaml|recipe\.json)",
    )
    return any(re.fullmatch(pattern, name) for pattern in patterns)
