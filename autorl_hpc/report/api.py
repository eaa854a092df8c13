"""What the commands use of this room."""

from __future__ import annotations

from pathlib import Path

from autorl_hpc.report.summary import MergedReport


def build(paths: list[Path]) -> MergedReport:
    """Reads every run below `paths` and merges them.

    Raises:
        AutorlError: there is nothing to report on; says what to do.
    """
    from autorl_hpc.report.merge import merge

    return merge(paths)


def write_reports(merged: MergedReport, out: Path | None) -> Path:
    """Writes the merged report and one per run; returns the path of index.html.

    Args:
        out: the folder; by default `report/` in the experiment, in the runs/ folder or in the run that was given, and
            `autorl-report/` in the current directory for runs of several roots.

    Raises:
        AutorlError: the folder can't be written.
    """
    from autorl_hpc.report.write import write_all

    return write_all(merged, Path(merged.default_out) if out is None else out)
