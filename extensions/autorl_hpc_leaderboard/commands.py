"""Commands of a leaderboard's maintainer: `check-submission`, `leaderboard build`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from autorl_hpc_leaderboard.submission import CheckedSubmission

app = typer.Typer(help="Build a leaderboard's site out of submissions.", no_args_is_help=True, rich_markup_mode=None)

Folders = Annotated[list[Path], typer.Argument(help="Submission folders, or folders above several.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.callback()
def _only() -> None:
    """Build a leaderboard's site out of submissions. Example: autorl-hpc leaderboard build site/ submissions/"""


def check_submission(folders: Folders, as_json: Json = False) -> None:
    """Check submissions: submission.yaml, and every bundle's chain, hashes and scores; exit code 1 if one has a problem.

    Example: autorl-hpc check-submission submissions/team-a
    """
    from autorl_hpc_leaderboard.submission import check, submissions_in

    with tempfile.TemporaryDirectory(prefix="autorl-submission-") as work:
        _tell([check(folder, Path(work)) for folder in submissions_in(folders)], as_json)


@app.command()
def build(
    site: Annotated[Path, typer.Argument(help="Where to write the site.")],
    folders: Folders,
    url: Annotated[str, typer.Option("--url", help="Where the site will be: https://...; for the feed's links.")] = "",
    verdicts: Annotated[
        Path | None, typer.Option("--verdicts", help="Your folder of `rescore --out`: what was measured again.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Build the site: ranks with noise, verified and rescored or not, each run's page, history, feed, badges.

    Submissions with a problem are named on the site and not ranked; then the exit code is 1.

    Example: autorl-hpc leaderboard build site/ submissions/ --url https://example.org/board
    """
    from autorl_hpc_leaderboard.site import build_site
    from autorl_hpc_leaderboard.submission import submissions_in

    if url and not url.startswith("https://"):
        raise typer.BadParameter("--url must begin with https://")
    _tell(build_site(submissions_in(folders), site.absolute(), url, verdicts), as_json)


def _tell(checked: list[CheckedSubmission], as_json: bool) -> None:
    from autorl_hpc.errors import Exit, visible

    rows = [
        {"submission": one.folder.name, "bundles": len(one.bundles), "problems": one.all_problems()} for one in checked
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
    for one in checked if not as_json else ():
        problems = one.all_problems()
        print(visible(f"{one.folder.name}: {'refused' if problems else f'ok, {len(one.bundles)} bundles'}"))
        for what in problems:
            print(visible(f"  {what}"))
    if any(row["problems"] for row in rows):
        raise typer.Exit(Exit.FAILED)
