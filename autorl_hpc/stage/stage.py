"""`autorl-hpc stage`: dispatch names to tasks, models and environments, unpack and pack bundles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.archive import SUFFIXES, packing_of
from autorl_hpc.files.layout import Root
from autorl_hpc.records.exchange import StoreManifest
from autorl_hpc.records.task import task_name
from autorl_hpc.scoring.harness import library
from autorl_hpc.stage.bundle import check_bundle_name, make_bundle, unpack
from autorl_hpc.stage.environments import PREFIX, stage_environment
from autorl_hpc.stage.models import check_packages, is_model, stage_model
from autorl_hpc.stage.sources import Say
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.loader import load_task


def stage(
    root: Root,
    names: list[str],
    *,
    source: Path | None = None,
    requirements: Path | None = None,
    bundle: Path | None = None,
    again: bool = False,
    keep_sources: bool = False,
    settings: Mapping[str, str] | None = None,
    say: Say = lambda _: None,
) -> list[dict[str, Any]]:
    """Stage all `names` (none: everything in the bundle `source`), pack them into `bundle`; return the manifests, and the bundle.
    `settings`: of another library's task. `source`: a folder (with a subfolder per task, if there is one), wheel, image or bundle to take files from."""
    if bundle is not None:
        check_bundle_name(bundle)
    if source is not None and not source.exists():
        raise AutorlError("there is no such file or folder", where=source, next_step="correct --from")
    if requirements is not None and not any(name.startswith(PREFIX) for name in names):
        raise AutorlError("--requirements is for environments", next_step=f"name one: {PREFIX}NAME")
    check_packages(root, names, again)
    staged: list[StoreManifest] = []
    # By its name too, so that a damaged bundle is reported as one.
    if source is not None and source.is_file() and (source.name.endswith(SUFFIXES) or packing_of(source) is not None):
        staged = unpack(root, source, names, again=again, say=say)
    elif not names:
        what, advice = "nothing is named, and --from gives no bundle", "name what to stage: autorl-hpc stage NAME ..."
        raise AutorlError(what, next_step=advice)
    for name in dict.fromkeys(() if staged else names):
        if name.startswith(PREFIX):
            own = name.removeprefix(PREFIX)
            staged.append(stage_environment(root, own, requirements=requirements, source=source, again=again, say=say))
        elif name != task_name(name):
            of = library(name.partition(":")[0])
            done = of.stage(root, name, source, settings or {}, again=again, say=say)
            staged += [done.store, done.vault]
        elif is_model(name):
            staged.append(stage_model(root, name, source, again=again, keep_sources=keep_sources, say=say))
        else:
            folder = source / name if source is not None and (source / name).is_dir() else source
            done = stage_task(root, load_task(name, root=root), folder, again=again, keep_sources=keep_sources, say=say)
            staged += [done.store, done.vault]
    facts = [manifest.model_dump(mode="json") for manifest in staged]
    for value in facts:  # a venv has ten thousand files; MANIFEST.json describes each
        value["files"] = [file for file in value["files"] if not file["path"].startswith("venv/")]
    return facts if bundle is None else [*facts, make_bundle(root, staged, bundle, say)]
