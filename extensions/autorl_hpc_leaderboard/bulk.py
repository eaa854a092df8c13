"""`rescore` of many bundles: one after the other here, or a Slurm job each; a verdict file for each bundle makes it resumable."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import atomic
from autorl_hpc.files.checkpoint import file_sha256
from autorl_hpc.files.layout import PACKAGE
from autorl_hpc.files.reading import read_json_or_none

MINUTES = 240


def verdict_path(out: Path, bundle: Path) -> Path:
    """Return the file of a bundle's verdict, named by its content: two people's bundles may have one name."""
    return out / f"{file_sha256(bundle)}.json"


def read_verdict(out: Path, bundle: Path) -> dict[str, Any] | None:
    """Return what `rescore --out OUT` wrote of these very bytes; null if nothing, or what can't be read: then it is scored again."""
    return _told(verdict_path(out, bundle))


def _told(path: Path) -> dict[str, Any] | None:
    value = read_json_or_none(path)
    return value if isinstance(value, dict) and value.get("bundle_sha256") == path.stem else None


def open_bundles(bundles: Sequence[Path], out: Path) -> list[Path]:
    """Return the bundles that have no verdict in `out` yet, each content once."""
    different: dict[Path, Path] = {}
    for bundle in bundles:
        different.setdefault(verdict_path(out, bundle), bundle)
    return [bundle for path, bundle in different.items() if _told(path) is None]


def write_verdict(out: Path, bundle: Path, facts: dict[str, object]) -> None:
    """Write the verdict of a bundle, with its name and the sha256 of what was judged."""
    out.mkdir(parents=True, exist_ok=True)
    path = verdict_path(out, bundle)
    told = {**facts, "bundle": bundle.name, "bundle_sha256": path.stem}
    atomic.write_bytes(path, (json.dumps(told, indent=1, sort_keys=True, default=str) + "\n").encode())


def rescore_here(
    bundles: Sequence[Path], out: Path, score: Callable[[Path], dict[str, object]], say: Callable[[str], None]
) -> bool:
    """Score each bundle without a verdict by `score`, and write its verdict; return whether all scores hold."""
    for bundle in open_bundles(bundles, out):
        say(f"{bundle.name} ...")
        try:
            facts = score(bundle)
        except AutorlError as error:
            if error.exit_code != Exit.FAILED:  # this machine lacks something: no verdict on the bundle
                raise
            facts = {"holds": False, "verdict": "damaged", "problems": [error.what], "head": None}
        write_verdict(out, bundle, facts)
        say(f"{bundle.name}: {facts['verdict']}")
    return all((read_verdict(out, bundle) or {}).get("holds") is True for bundle in bundles)


def submit(
    bundles: Sequence[Path], out: Path, cluster: str, options: Sequence[str], root: Path, say: Callable[[str], None]
) -> int:
    """Submit a job like a grader's for each bundle without a verdict; return how many. Jobs of an earlier call that still wait or run
    are not submitted twice. `options`: further options of `autorl-hpc rescore` for the jobs."""
    from autorl_hpc.cluster import slurm
    from autorl_hpc.cluster.profile import load_profile, module_lines, python_command
    from autorl_hpc.doctor.scheduler import Request

    profile = load_profile(cluster)
    left = open_bundles(bundles, out)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    digests = {bundle: file_sha256(bundle) for bundle in left}
    names = {bundle: f"autorl-rescore-{digest[:16]}" for bundle, digest in digests.items()}
    alive = {job.name for job in slurm.alive(slurm.jobs(names.values()))} if left else set()
    request = Request(profile, profile.grader, MINUTES)
    # This very version, whatever the job's Python has.
    code = f"{PACKAGE.parent}:{Path(__file__).resolve().parent.parent}"
    for bundle in left:
        if names[bundle] in alive:
            say(f"{bundle.name}: its job is waiting or running")
            continue
        words = ["rescore", str(bundle.absolute()), "--out", str(out.absolute()), "--root", str(root), *options]
        python = python_command(profile, sorted({str(root), str(out.absolute()), str(bundle.absolute().parent)}))
        lines = [
            *("#!/bin/bash", *module_lines(profile), *profile.setup),
            f"export PYTHONPATH={shlex.quote(code)}${{PYTHONPATH:+:$PYTHONPATH}}",
            f"cd {shlex.quote(str(root))} || exit",
            f"exec {python} -m autorl_hpc {shlex.join(words)}\n",
        ]
        log = out.absolute() / "logs" / f"{digests[bundle]}.log"
        slurm.sbatch("\n".join(lines), [f"--job-name={names[bundle]}", f"--output={log}", *request.options()])
        say(f"{bundle.name}: submitted, log {log}")
    return len(left)
