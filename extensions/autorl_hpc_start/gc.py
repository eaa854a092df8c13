"""`autorl-hpc gc RUNS`: free the disk that experiments no longer need: workspaces of closed runs, artifacts that nobody keeps."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from autorl_hpc.errors import AutorlError, Exit, visible
from autorl_hpc_start.listing import disk_bytes

HASH_LENGTH = 64  # the name of an artifact's folder


@dataclass(frozen=True)
class Spare:
    """A folder that can go."""

    path: Path
    why: str
    size_bytes: int


def gc(
    paths: Annotated[list[Path], typer.Argument(help="Experiments, or runs/ folders.")],
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove what is listed; without it nothing is removed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """List (or remove) workspaces of closed runs, and artifacts that `retention` does not keep. Records are never touched.

    Example: autorl-hpc gc runs/ --delete
    """
    from autorl_hpc.doctor.finding import State
    from autorl_hpc.doctor.storage import quota
    from autorl_hpc.report.find import experiments_in

    found = [spare for experiment in experiments_in(paths) for spare in spares(experiment.path)]
    failed = [spare.path for spare in found if delete and not _removed(spare.path)]
    total = sum(spare.size_bytes for spare in found)
    for finding in quota(paths[0]):  # before it is full: then writes fail in the middle of runs
        if finding.state in (State.WARNING, State.PROBLEM):
            print(f"{finding.check}: {finding.value}: {finding.do_this}", file=sys.stderr)
    if as_json:
        rows = [{"path": str(spare.path), "why": spare.why, "bytes": spare.size_bytes} for spare in found]
        print(json.dumps({"deleted": delete, "bytes": total, "spare": rows, "failed": [str(path) for path in failed]}))
    else:
        for spare in found:
            print(f"{spare.size_bytes / 1e9:8.2f} GB  {visible(str(spare.path))}  {spare.why}")
        print(f"{total / 1e9:.2f} GB in {len(found)} folders {'removed' if delete else 'could be removed: --delete'}")
    if failed:
        advice = "look at its owner and its permissions"
        raise AutorlError("could not be removed", where=failed[0], next_step=advice, exit_code=Exit.ENVIRONMENT)


def spares(experiment: Path) -> Iterator[Spare]:
    """Yield what an experiment no longer needs: workspaces of closed runs and, once all runs are closed, spare artifacts."""
    from autorl_hpc.files.frozen_records import read_experiment
    from autorl_hpc.files.layout import ExperimentDir
    from autorl_hpc.files.ledger import Ledger
    from autorl_hpc.files.run_view import RunView
    from autorl_hpc.report.find import runs_on_disk

    place = ExperimentDir(experiment)
    record = read_experiment(place)
    here = place.path.resolve() == Path(record.root).resolve() / "runs" / place.path.name
    scratch = (Path(record.scratch) if record.scratch else Path(record.root) / "scratch") / place.path.name
    keep_all, all_closed = record.spec.retention.artifacts == "all", True
    needed: set[str | None] = set()
    for run_id in sorted({*record.runs, *runs_on_disk(place)}):
        run = place.run(run_id)
        try:
            view = RunView.of(Ledger(run).read())
        except (AutorlError, OSError):  # damaged or gone: nothing that it may need may go
            all_closed = False
            continue
        if view.closed is None:
            all_closed = False
            continue
        needed |= {
            one.content_hash for number, one in view.submissions.items() if keep_all or number == view.closed.selected
        }
        workspace = _workspace(run.workspace_link)
        if here and workspace == scratch / run_id:  # a copy of an experiment names the workspaces of the original
            yield Spare(workspace, f"workspace of {run_id}, which is closed", disk_bytes(workspace))
    if all_closed and place.artifacts.is_dir():
        for folder in sorted(place.artifacts.iterdir()):
            if len(folder.name) == HASH_LENGTH and folder.name not in needed:
                yield Spare(folder, "artifact that retention does not keep", disk_bytes(folder))


def _workspace(link: Path) -> Path | None:
    try:
        path = Path(json.loads(link.read_text(encoding="utf-8"))["workspace"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if path.is_dir() and not path.is_symlink() else None


def _removed(path: Path) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()
