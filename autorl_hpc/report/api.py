"""What the commands use of this room."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autorl_hpc.files.layout import ExperimentDir

if TYPE_CHECKING:
    from autorl_hpc.report.refresh import Refreshed
    from autorl_hpc.report.summary import MergedReport
    from autorl_hpc.report.versus import Versus


def build(paths: list[Path]) -> MergedReport:
    """Reads every run below `paths` and merges them.

    Raises:
        AutorlError: there is nothing to report on; says what to do.
    """
    from autorl_hpc.report.merge import merge

    return merge(paths)


def with_paper(merged: MergedReport) -> MergedReport:
    """With the published results beside it.

    Raises:
        AutorlError: their file is missing or wrong.
    """
    from autorl_hpc.report.paper import read_paper

    return merged.model_copy(update={"paper": read_paper()})


def write_reports(merged: MergedReport, out: Path | None, *, figures: bool = False) -> Path:
    """Writes the merged report and one per run; returns the path of index.html.

    Args:
        figures: PNG and SVG files too, into figures/ beside it.
        out: the folder; by default `report/` in the experiment, in the runs/ folder or in the run that was given, and
            `autorl-report/` in the current directory for runs of several roots.

    Raises:
        AutorlError: the folder can't be written.
    """
    from autorl_hpc.report.write import write_all

    index = write_all(merged, Path(merged.default_out) if out is None else out)
    if figures:
        from autorl_hpc.report.charts.files import write_figures

        write_figures(merged, index.parent)
    return index


def compare(merged: MergedReport, a: str, b: str) -> Versus:
    """Two agents, experiments or folders of a report against each other.

    Raises:
        AutorlError: a side is not in the report, or names more than one agent; says which there are.
    """
    from autorl_hpc.report.versus import compare as of

    return of(merged, a, b)


def write_comparison(versus: Versus, folder: Path) -> None:
    """Writes compare.html, compare.md and compare.json into the folder of a report.

    Raises:
        AutorlError: the folder can't be written.
    """
    from autorl_hpc.report.write import write_versus

    write_versus(versus, folder)


def bring_up_to_date(paths: list[Path], out: Path | None = None) -> Refreshed:
    """The report on all runs below `paths` with its figures, reading only what changed since the last one; see `report.refresh`.

    Raises:
        AutorlError: there is nothing to report on, or the folder can't be written.
    """
    from autorl_hpc.report.refresh import Options, refresh

    return refresh(paths, out, Options(figures=True))


def show(done: Refreshed, sides: tuple[str, str] | None = None) -> None:
    """Prints the report's table for this terminal, or the comparison of two sides; of a report that had not changed, as kept."""
    import io
    import sys

    from rich.console import Console

    from autorl_hpc.report.terminal import print_comparison, print_summary

    here = Console()

    def render(merged: MergedReport) -> str:
        page = Console(file=io.StringIO(), width=here.width, force_terminal=here.is_terminal, no_color=here.no_color)
        if sides is None:
            print_summary(merged, page, done.index)
        else:
            print_comparison(compare(merged, *sides), page, done.index.parent)
        text = page.file.getvalue()  # type: ignore[attr-defined]
        return str(text)

    name = f"{here.width} {here.is_terminal} {here.no_color} {done.index} {sides}"
    sys.stdout.write(done.text(name, render))


def keep_heads(experiment: ExperimentDir) -> list[str]:
    """Writes where the chains stand into heads.json and, where this is a job that may, into its comment; lines for the log.

    Raises:
        OSError: heads.json can't be written.
    """
    from autorl_hpc.cluster import told
    from autorl_hpc.errors import AutorlError
    from autorl_hpc.files.heads import heads_of, in_words, run_head, write_heads
    from autorl_hpc.report.places import runs_on_disk

    found, lines = [], []
    for run_id in runs_on_disk(experiment):
        try:
            found.append(run_head(experiment.run(run_id)))
            lines.append(in_words(found[-1]))
        except (AutorlError, OSError) as error:
            lines.append(f"head of {run_id}: unknown: {error}")
    heads = heads_of(experiment, found)
    write_heads(experiment, heads)
    where = "in this job's comment too" if told.tell(heads.short) else "in this log and in heads.json alone"
    return [*lines, f"head of {heads.experiment}: {heads.head} ({where}; keep it where this account can't write)"]
