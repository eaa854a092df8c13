"""The commands. Thin: parse, call, print. Heavy imports stand inside the commands, so that --help answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autorl_hpc import __version__, cli_evidence
from autorl_hpc.cli_jobs import JsonOption, job_app, print_json
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import ROOT_VARIABLE, ExperimentDir, Root, RunDir, default_root
from autorl_hpc.stage import options

app = typer.Typer(
    name="autorl-hpc",
    help="Measures whether LLM agents can do RL post-training, as a batch suite for Slurm clusters.\n\n"
    "Example: autorl-hpc quickstart",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(job_app)

RootOption = Annotated[
    Path | None,
    typer.Option(
        "--root", help=f"Folder with store/, vault/ and runs/ (default: ${ROOT_VARIABLE}, else the current folder)."
    ),
]
TasksOption = Annotated[list[Path] | None, typer.Option("--tasks", help="Folder with task folders of your own.")]
AgentsOption = Annotated[list[Path] | None, typer.Option("--agents", help="Folder with agent folders of your own.")]


def _root(given: Path | None) -> Root:
    place = (given or default_root()).absolute()
    stands = next(path for path in (place, *place.parents) if path.exists())
    if not stands.is_dir():
        raise AutorlError(
            f"{'--root' if given else f'${ROOT_VARIABLE}'} is a file, or lies below one: it must be a folder",
            where=stands,
            next_step="give the folder that holds store/, vault/ and runs/, or a new one",
        )
    return Root(place)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"autorl-hpc {__version__}")
        raise typer.Exit


@app.command()
def quickstart(
    root: Annotated[Path | None, typer.Option("--root", help="Where to work (default: ./autorl-quickstart).")] = None,
    jobs: Annotated[int, typer.Option("--parallel", min=1, max=10000, help="Agents at once.")] = 2,
) -> None:
    """The whole loop on this machine: tiny base model, embedded task, scripted agents, a grader, a report.

    Needs no Slurm, no GPU and no network; takes a few minutes on two cores.

    Example: autorl-hpc quickstart
    """
    from autorl_hpc.quickstart import run_quickstart

    raise typer.Exit(run_quickstart(_root(root or Path("autorl-quickstart")).path, jobs, _say))


@app.command()
def stage(
    names: options.Names = None,
    source: options.Source = None,
    bundle: options.Bundle = None,
    requirements: options.Requirements = None,
    again: options.Again = False,
    keep_sources: options.KeepSources = False,
    tasks: TasksOption = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring in and verify task data, base models and environments; do it on the login node, before anything is queued.

    Example: autorl-hpc stage gsm8k --from ~/grade-school-math/data
    """
    from autorl_hpc.stage import api
    from autorl_hpc.tasks.loader import put_first

    put_first(tasks or [])
    if not names and source is None:
        raise typer.BadParameter("Missing argument 'NAMES...'.")
    place, ways = _root(root), api.Ways(source, requirements, bundle, again, keep_sources)
    done = api.stage(place, names or [], ways, _say)
    if as_json:
        print_json(done)


def _job_file(given: Path) -> Path:
    """The file as given; where there is none, the one of that name that ships with the package."""
    from autorl_hpc.files.share import share

    shipped = share("jobs") / given.name
    if given.exists() or given.parent not in (Path(), Path("jobs")) or not shipped.is_file():
        return given
    _say(f"{given} is not here; using {shipped} of the package")
    return shipped


@app.command()
def launch(
    job: Annotated[Path, typer.Argument(help="The experiment's YAML file, or one that ships (jobs/gsm8k.yaml).")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the matrix and what it may cost; start nothing.")
    ] = False,
    keep_frozen: Annotated[
        bool, typer.Option("--keep-frozen", help="Resume with the code as it was launched, though it changed since.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show the status until the experiment is over.")] = False,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="A cluster's profile, by name or file, instead of the experiment's.")
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Start though the program of an agent, or vLLM, was not found here.")
    ] = False,
    tasks: TasksOption = None,
    agents: AgentsOption = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start an experiment; again = resume: finished runs stay, interrupted ones go on, nothing is done twice.

    Example: autorl-hpc launch jobs/gsm8k.yaml --cluster mycluster --dry-run
    """
    from autorl_hpc import agents as own_agents
    from autorl_hpc.launch import dryrun, launcher, start
    from autorl_hpc.tasks.loader import put_first

    place, job = _root(root), _job_file(job)
    put_first(tasks or [])
    own_agents.put_first(agents or [])
    if dry_run:
        described = dryrun.describe(launcher.plan(job, place, keep_frozen=keep_frozen, cluster=cluster), job)
        print_json(described) if as_json else print(dryrun.as_text(described))
        return
    planned, record = launcher.prepare(job, place, keep_frozen=keep_frozen, cluster=cluster, checked=not unchecked)
    facts = start.start(planned, record, _say)
    print_json(facts) if as_json else print(start.as_text(facts))
    if follow:
        from autorl_hpc.report.live import watch

        watch([planned.experiment.path])


@app.command()
def status(
    paths: Annotated[list[Path], typer.Argument(help="Experiment folders, or a runs/ folder.")],
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until everything is over.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show runs, states, scores, budget left, graders and faults.

    Example: autorl-hpc status runs/quickstart --watch
    """
    from autorl_hpc.report import live

    if watch and not as_json:
        live.watch(paths)
        return
    facts = live.collect(paths)
    print_json(facts) if as_json else live.show(facts)


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="Runs, experiments, or runs/ folders; several are merged.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write (default: report/ beside the runs).")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option("--compare", metavar="A B", help="Two agents (AGENT[/DRIVER[/MODE]]), experiments or folders."),
    ] = None,
    paper: Annotated[bool, typer.Option("--paper", help="Show the paper's published results, clearly apart.")] = False,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw PNG and SVG files too.")] = True,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Read everything again, nothing that was kept of an earlier report.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Report again and again until every run is over.")] = False,
    every: Annotated[int, typer.Option("--every", min=1, help="With --watch: seconds between two reports.")] = 30,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only where the report lies.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Merge ledgers into one report: index.html, summary.json, .csv, .md, leaderboard.csv, figures/, and one per run.

    Results folders of AutoRL-Bench are read too. Runs that did not change since the last report are not read again.

    Example: autorl-hpc report runs/ --compare claude-code codex
    """
    from autorl_hpc.report import api, refresh

    options = refresh.Options(fresh=fresh, paper=paper, figures=figures, compare=compare)
    if watch:
        from autorl_hpc.report.watching import watch_report

        watch_report(paths, out, options, every, _say)
        return
    done = refresh.refresh(paths, out, options)
    if as_json:
        sys.stdout.write(done.json_text(compare is not None))
    else:
        print(done.index) if quiet else api.show(done, compare)


cli_evidence.add_to(app)


@app.command()
def doctor(
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="A profile of jobs/clusters/, or its file: what its jobs would meet."),
    ] = None,
    no_jobs: Annotated[bool, typer.Option("--no-jobs", help="Submit nothing: what needs a job stays unknown.")] = False,
    agents: AgentsOption = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the cluster and this host: what works, what follows, what to do; exit code 1 if there is a problem.

    Submits two jobs of some minutes at most, one with a GPU if the profile's agents have one, and takes them back.

    Example: autorl-hpc doctor --cluster mine
    """
    from autorl_hpc import agents as own_agents
    from autorl_hpc.doctor import api

    own_agents.put_first(agents or [])
    findings = api.diagnose(_root(root).path, cluster, jobs=not no_jobs, say=_say)
    if as_json:
        print_json(api.as_json(findings))
    else:
        from rich.console import Console

        from autorl_hpc.doctor.page import show

        show(findings, Console())
    raise typer.Exit(api.exit_code(findings))


@app.command()
def cancel(
    experiment: Annotated[Path, typer.Argument(help="The experiment's folder.")],
    runs: Annotated[list[str] | None, typer.Argument(help="Run ids (default: all).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Stop runs cleanly: agents end, what was accepted is still scored, the runs are closed.

    Example: autorl-hpc cancel runs/quickstart
    """
    from autorl_hpc.launch.cancel import cancel_runs

    facts = cancel_runs(ExperimentDir(experiment.absolute()), runs or [], _say)
    print_json(facts) if as_json else print(facts["text"])
    if facts["not_sealed"] or facts["jobs_left"]:
        raise typer.Exit(Exit.FAILED)


@app.command()
def attach(
    run: Annotated[Path, typer.Argument(help="The folder of a run of agent `shell`, on the node it is on.")],
) -> None:
    """Type into the shell of a run of agent `shell`; ctrl-] lets go and leaves it as it is, `exit` ends the run.

    Example: autorl-hpc attach runs/try/gsm8k-shell-tiny-free-s0-1a2b3c4d
    """
    from autorl_hpc.agents.attach import attach_to

    attach_to(RunDir(run.absolute()))


def _agent_side(tool: str, arguments: list[str]) -> None:
    import os
    import runpy

    from autorl_hpc.files.share import share

    os.environ["AUTORL_TOOL"] = tool
    sys.argv = [tool, *arguments]
    runpy.run_path(str(share("templates") / "workspace" / "submit"), run_name="__main__")


_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_PASS_ON)
def submit(context: typer.Context) -> None:
    """In a workspace: drop a checkpoint for scoring. Example: autorl-hpc submit output/v1 --wait"""
    _agent_side("submit", context.args)


@app.command(context_settings=_PASS_ON)
def results(context: typer.Context) -> None:
    """In a workspace: print the answers so far. Example: autorl-hpc results"""
    _agent_side("results", context.args)


@app.command(name="time", context_settings=_PASS_ON)
def time_left(context: typer.Context) -> None:
    """In a workspace: print the budget that is left. Example: autorl-hpc time"""
    _agent_side("time", context.args)
