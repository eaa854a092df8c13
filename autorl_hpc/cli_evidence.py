"""The commands for those who must believe a number that somebody else measured: verify, anchor, export, rescore."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autorl_hpc.cli_jobs import JsonOption, print_json
from autorl_hpc.errors import AutorlError, Exit

PathsArgument = Annotated[list[Path], typer.Argument(help="Runs, experiments, or runs/ folders.")]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def verify(
    paths: PathsArgument,
    expect: Annotated[
        list[str] | None,
        typer.Option("--expect", metavar="HEAD", help="A head that was kept elsewhere, of an experiment or a run."),
    ] = None,
    anchors: Annotated[Path | None, typer.Option("--anchors", help="A file that `autorl-hpc anchor` wrote.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="The key that its anchors were signed with.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Re-compute the chain of every ledger and the hashes that it names; exit code 1 if anything was altered or could not be
    compared.

    Example: autorl-hpc verify runs/ --expect 5f0c8e...
    """
    from autorl_hpc.report import anchors as known
    from autorl_hpc.report.verify import as_lines, verify_paths

    if (anchors is None) != (key is None):
        raise AutorlError("--anchors and --key belong together", next_step="give both, or none")
    signed = known.read_anchors(anchors, known.read_key_file(key)) if anchors and key else ()
    heads = tuple(known.normal_head(head) for head in expect or [])
    results = verify_paths(paths, known.Known(heads, signed))
    print_json([r.as_dict() for r in results]) if as_json else print("\n".join(as_lines(results)))
    if any(not result.whole for result in results):
        raise typer.Exit(Exit.FAILED)


def anchor(
    paths: PathsArgument,
    key: Annotated[Path, typer.Option("--key", help="A file with the key alone, for its owner alone (chmod 600).")],
    out: Annotated[Path, typer.Option("--out", help="The anchors file; lines are added to one that is there.")],
    as_json: JsonOption = False,
) -> None:
    """Sign where the ledgers stand (HMAC-SHA256), as a second user: `verify --anchors` tells later what changed since.

    Example: autorl-hpc anchor /shared/runs --key ~/anchor.key --out ~/anchors.jsonl
    """
    from autorl_hpc.report import anchors as known

    made = known.make_anchors(paths, known.read_key_file(key))
    known.add_anchors(out, made)
    if as_json:
        print_json([one.model_dump(mode="json") for one in made])
        return
    for one in made:
        print(f"{one.heads.experiment}: {len(one.heads.runs)} runs, head {one.heads.head}")
    print(f"added to {out}")


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a closed run.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The bundle, .tar.zst or .tar.gz (default: RUN_ID.tar.zst here).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Pack a run's evidence and its selected weights into one file, without held-out text: `rescore` takes it.

    Example: autorl-hpc export runs/gsm8k/gsm8k-sft-tiny-free-s0-1a2b3c4d
    """
    from autorl_hpc.evidence.export import export_run

    done = export_run(run, out, _say)
    print_json(done.as_dict()) if as_json else print(done.as_text())


def rescore(
    bundle: Annotated[Path, typer.Argument(help="A bundle that `autorl-hpc export` made, here or elsewhere.")],
    root: Annotated[
        Path | None, typer.Option("--root", help="Folder with store/ and vault/: task and base model staged here.")
    ] = None,
    tasks: Annotated[list[Path] | None, typer.Option("--tasks", help="Folder with task folders of your own.")] = None,
    expect: Annotated[
        str | None, typer.Option("--expect", metavar="HEAD", help="The run's head, as it was kept elsewhere.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="Score with this engine; default: the one that the run was scored with."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="This site's profile: its `vllm` names the program of the engine vllm."),
    ] = None,
    judge_url: Annotated[
        str | None, typer.Option("--judge-url", help="For tasks with a judge: where the recipe's judge answers here.")
    ] = None,
    judge_key: Annotated[Path | None, typer.Option("--judge-key", help="A file with its key alone.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Score an exported run's weights again, here, and compare: exit code 1 if the evidence or the score doesn't hold.

    Example: autorl-hpc rescore gsm8k-sft-tiny-free-s0-1a2b3c4d.tar.zst --root /data/autorl
    """
    from autorl_hpc.evidence.rescore import Asked, rescore_bundle
    from autorl_hpc.files.layout import Root, default_root
    from autorl_hpc.report.anchors import normal_head
    from autorl_hpc.tasks.loader import put_first

    put_first(tasks or [])
    place = Root((root or default_root()).absolute())
    asked = Asked(device, judge_url, judge_key, normal_head(expect) if expect else None, engine, cluster)
    done = rescore_bundle(place, bundle, asked, _say)
    print_json(done.as_dict()) if as_json else print("\n".join(done.as_lines()))
    if not done.holds:
        raise typer.Exit(Exit.FAILED)


def add_to(app: typer.Typer) -> None:
    """Adds the commands of this file."""
    for command in (verify, anchor, export, rescore):
        app.command()(command)
