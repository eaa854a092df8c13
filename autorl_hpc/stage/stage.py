"""`autorl-hpc stage`: what a name stands for, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.archive import SUFFIXES, packing_of
from autorl_hpc.files.layout import Root
from autorl_hpc.records.exchange import StoreManifest
from autorl_hpc.stage.bundle import check_bundle_name, make_bundle, unpack
from autorl_hpc.stage.environments import PREFIX, stage_environment
from autorl_hpc.stage.models import is_model, stage_model
from autorl_hpc.stage.sources import Say
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.loader import load_task


def is_bundle(source: Path | None) -> bool:
    """Whether `--from` gives a bundle: by its content, whatever its name; or by its name, so that a damaged one is called so."""
    return (
        source is not None and source.is_file() and (source.name.endswith(SUFFIXES) or packing_of(source) is not None)
    )


@dataclass(frozen=True)
class Ways:
    """How things are staged.

    Attributes:
        source: where from, instead of a download: a folder (of each task its own below it, if there is one), wheel, image or
            bundle.
        requirements: of an environment.
        bundle: the file that what was staged is packed into.
        again: whether staged or not.
        keep_sources: leave downloads where they are.
    """

    source: Path | None = None
    requirements: Path | None = None
    bundle: Path | None = None
    again: bool = False
    keep_sources: bool = False


PLAIN = Ways()


def stage(root: Root, names: list[str], ways: Ways = PLAIN, say: Say = lambda _: None) -> list[dict[str, Any]]:
    """Stages all that is named (none: all that the bundle `ways.source` holds), and packs it, if that is asked.

    Returns:
        the manifests, and what was packed.

    Raises:
        AutorlError: see the parts.
    """
    source = ways.source
    if ways.bundle is not None:
        check_bundle_name(ways.bundle)
    if source is not None and not source.exists():
        raise AutorlError("there is no such file or folder", where=source, next_step="correct --from")
    if ways.requirements is not None and not any(name.startswith(PREFIX) for name in names):
        raise AutorlError("--requirements is for environments", next_step=f"name one: {PREFIX}NAME")
    staged: list[StoreManifest] = []
    if source is not None and is_bundle(source):
        staged = unpack(root, source, names, again=ways.again, say=say)
    elif not names:
        raise AutorlError(
            "nothing is named, and --from gives no bundle", next_step="name what to stage: autorl-hpc stage NAME ..."
        )
    else:
        for name in dict.fromkeys(names):
            staged += _stage_one(root, name, ways, say)
    done = [_as_json(manifest) for manifest in staged]
    if ways.bundle is not None:
        packed = make_bundle(root, staged, ways.bundle, say)
        done.append(
            {"kind": "bundle", "path": str(packed.path), "sha256": packed.sha256, "size_bytes": packed.size_bytes}
        )
    return done


def _stage_one(root: Root, name: str, ways: Ways, say: Say) -> list[StoreManifest]:
    if name.startswith(PREFIX):
        own = name.removeprefix(PREFIX)
        return [
            stage_environment(root, own, requirements=ways.requirements, source=ways.source, again=ways.again, say=say)
        ]
    if is_model(name):
        return [stage_model(root, name, ways.source, again=ways.again, keep_sources=ways.keep_sources, say=say)]
    task = load_task(name)
    done = stage_task(
        root, task, _folder_of(name, ways.source), again=ways.again, keep_sources=ways.keep_sources, say=say
    )
    return [done.store, done.vault]


def _folder_of(name: str, source: Path | None) -> Path | None:
    """Of a folder with the files of several tasks, that of one: DIR/TASK where it is there, else DIR itself."""
    return source if source is None or not (source / name).is_dir() else source / name


def _as_json(manifest: StoreManifest) -> dict[str, Any]:
    value = manifest.model_dump(mode="json")
    if manifest.kind == "environment":  # a venv has ten thousand files, each described in its MANIFEST.json
        value["files"] = [file for file in value["files"] if not file["path"].startswith("venv/")]
    return value
