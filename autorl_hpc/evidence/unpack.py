"""Unpack an exported run, and check that this machine has what it was scored with (task, splits, recipe, scorer, base model).

The bundle is not trusted: every name, size and hash is checked, and nothing is written outside the target folder.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, NamedTuple

from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.evidence import export
from autorl_hpc.evidence.verify import VerifyResult, verify_run
from autorl_hpc.files import artifacts, atomic, reading
from autorl_hpc.files.archive import ArchiveReader, DamagedArchive, packing_of, write_hashed
from autorl_hpc.files.checkpoint import tensors_of
from autorl_hpc.files.frozen_records import read_run
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.store import verify_model
from autorl_hpc.launch.expand import JUDGE_PARAMETERS
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.entries import Submission
from autorl_hpc.records.exchange import EvidenceManifest
from autorl_hpc.records.experiment import JudgeSpec
from autorl_hpc.records.run import RunRecord
from autorl_hpc.records.task import Recipe
from autorl_hpc.scoring.judges import JUDGE_MODEL
from autorl_hpc.scoring.registry import scorer
from autorl_hpc.stage.sources import check_space
from autorl_hpc.states import Protocol, Split
from autorl_hpc.tasks.folders import with_scorer_hash
from autorl_hpc.tasks.heldout import verify_staged_task, with_pins
from autorl_hpc.tasks.loader import load_task

MAX_HEAD_BYTES = 32 * 1024 * 1024
MAX_FILES = 100_000
MAX_RECORDS_BYTES = 4 * 1024**3  # All records together; a run of ten thousand submissions needs less

ROW_BYTES = 4096
NEXT_STEP = "take it again from where it was made, and compare its sha256; don't trust what this one says"


def unpack_evidence(bundle: Path, into: Path, weights_allowed: Callable[[EvidenceManifest], int]) -> EvidenceManifest:
    """Unpack `bundle` into the empty folder `into`, as `experiment/` and `task/`; return its manifest.
    `weights_allowed`: called before anything is written; returns the largest plausible size of the weights in bytes.
    Raises AutorlError: it is not an exported run, was cut or altered, or is too large."""
    try:
        packing = packing_of(bundle)
        if packing is None:
            raise _refused(bundle, f"{bundle.name} is not a bundle: neither tar nor packed by gzip or zstd")
        with closing(ArchiveReader(bundle, packing, MAX_HEAD_BYTES + ROW_BYTES)) as source, source.damage():
            files = source.files()
            manifest = _head(bundle, next(files, None))
            _check_sizes(manifest, weights_allowed(manifest))
            check_space(into, sum(file.size_bytes for file in manifest.files), f"the bundle {bundle.name}")
            source.bound.allowed = sum(f.size_bytes + ROW_BYTES for f in manifest.files) + MAX_HEAD_BYTES
            missing = {file.path: file for file in manifest.files}
            for name, size_bytes, data in files:
                row = missing.pop(name, None)
                if row is None or row.size_bytes != size_bytes:
                    raise DamagedArchive(f"{name[:200]!r} is not as {export.MANIFEST_NAME} says")
                write_hashed(into / row.path, data, row, export.MANIFEST_NAME)
            if missing:
                raise DamagedArchive(f"it ends without {min(missing)}")
        _mark_artifact(ExperimentDir(into / export.EXPERIMENT), manifest)
        return manifest
    except DamagedArchive as error:
        raise _refused(bundle, f"{bundle.name} is damaged: {error}") from None
    except OSError as error:
        raise from_os_error(error, f"unpacking {bundle.name}", error.filename or into) from error


MOST_WEIGHTS_BYTES = 64 << 30  # of a bundle whose base model is not staged here


class CheckedBundle(NamedTuple):
    """An unpacked and verified bundle; of a damaged one only the verdict."""

    verdict: VerifyResult
    manifest: EvidenceManifest | None = None
    experiment: ExperimentDir | None = None


def verify_bundle(bundle: Path, into: Path) -> CheckedBundle:
    """Unpack a bundle below the empty folder `into` and verify its run. Raises nothing for what it holds."""
    try:
        manifest = unpack_evidence(bundle, into, lambda _: MOST_WEIGHTS_BYTES)
    except AutorlError as error:
        return CheckedBundle(VerifyResult(bundle.name, problems=[error.what]))
    (into / "runs").mkdir()
    experiment = ExperimentDir((into / export.EXPERIMENT).rename(into / "runs" / manifest.experiment))
    return CheckedBundle(verify_unpacked(experiment, manifest), manifest, experiment)


def verify_unpacked(experiment: ExperimentDir, manifest: EvidenceManifest) -> VerifyResult:
    """Verify the run of an unpacked bundle, and that head, base model and weights are those that EVIDENCE.json names."""
    run = experiment.run(manifest.run_id)
    try:
        verdict = verify_run(experiment, run, exported=True)
        if not verdict.problems:
            verdict.problems += _otherwise_than_named(manifest, read_run(run), Ledger(run))
    except (AutorlError, OSError, ValueError) as error:
        return VerifyResult(run.run_id, problems=[error.what if isinstance(error, AutorlError) else str(error)])
    return verdict


def _otherwise_than_named(manifest: EvidenceManifest, record: RunRecord, ledger: Ledger) -> Iterator[str]:
    view, science = RunView.of(ledger.read()), record.science
    if (ledger.head(), len(ledger.entries)) != (manifest.head.head, manifest.head.entries):
        yield f"{export.MANIFEST_NAME} names another head than the ledger has"
    base = (science.base_model, science.base_model_content_hash)
    if base != (manifest.base_model, manifest.base_model_content_hash):
        yield f"{export.MANIFEST_NAME} names another base model than run.json"
    selected = selected_of(view)
    wanted = None if selected is None or selected.is_base else selected.content_hash
    held = manifest.weights.content_hash if manifest.weights else None
    if view.closed is None:
        yield "the run is not closed"
    elif view.closed.selected is not None and (selected is None or selected.status != "accepted"):
        yield "the closing entry selects a submission that was not accepted"
    elif wanted != held:
        yield f"the ledger's selected checkpoint is {str(wanted)[:16]}, the bundle holds {str(held)[:16]}"


def selected_of(view: RunView) -> Submission | None:
    """Return the submission that a closed run selected; None: the base model."""
    return view.submissions.get(view.closed.selected) if view.closed and view.closed.selected else None


def verify_bundles(bundles: Sequence[Path]) -> list[VerifyResult]:
    """Verify bundles one by one, in a temporary folder."""
    found = []
    for bundle in bundles:
        with tempfile.TemporaryDirectory(prefix="autorl-verify-") as work:
            found.append(verify_bundle(bundle, Path(work)).verdict)
    return found


def lay_out(bundles: Sequence[Path], into: Path, say: Callable[[str], None]) -> list[Path]:
    """Unpack whole bundles, without their weights, for a report; return the experiments' folders. Damaged ones are named and left out."""
    shutil.rmtree(into, ignore_errors=True)
    whole = []
    for number, bundle in enumerate(bundles):
        place = into / f"{number:03d}"
        place.mkdir(parents=True)
        verdict, _, experiment = verify_bundle(bundle, place)
        if experiment is None or verdict.problems:
            say(f"{bundle.name} is left out: {verdict.problems[0]}")
            shutil.rmtree(place)
            continue
        shutil.rmtree(experiment.artifacts, ignore_errors=True)
        whole.append(experiment.path)
    return whole


def _refused(bundle: Path, what: str) -> AutorlError:
    return AutorlError(what, where=bundle, next_step=NEXT_STEP, exit_code=Exit.FAILED)


def _head(bundle: Path, first: tuple[str, int, IO[bytes]] | None) -> EvidenceManifest:
    if first is None or first[0] != export.MANIFEST_NAME or first[1] > MAX_HEAD_BYTES:
        raise _refused(bundle, f"{bundle.name} is no exported run: it doesn't begin with {export.MANIFEST_NAME}")
    try:
        value = json.loads(first[2].read())
    except RecursionError:
        raise DamagedArchive(f"{export.MANIFEST_NAME} is nested too deeply") from None
    manifest = parse_record(EvidenceManifest, value, f"{bundle}:{export.MANIFEST_NAME}", next_step=NEXT_STEP)
    if not export.is_run_id(manifest.run_id) or manifest.head.run_id != manifest.run_id:
        raise DamagedArchive(f"{manifest.run_id[:100]!r} is no run")
    names = [file.path for file in manifest.files]
    if len(set(names)) != len(names):
        raise DamagedArchive(f"a file is twice in {export.MANIFEST_NAME}")
    content = manifest.weights.content_hash if manifest.weights else None
    for name in names:
        if not export.is_record(name, manifest.run_id) and not export.is_weights(name, content):
            raise DamagedArchive(f"{name[:200]!r} is not a file of an exported run")
    return manifest


def _check_sizes(manifest: EvidenceManifest, weights_allowed: int) -> None:
    content = manifest.weights.content_hash if manifest.weights else None
    records = {file.path: file.size_bytes for file in manifest.files if not export.is_weights(file.path, content)}
    large = next((name for name, size_bytes in records.items() if size_bytes > reading.MAX_RECORD_BYTES), None)
    if large is not None:
        raise DamagedArchive(f"{large} has {records[large]} bytes: no record is so large")
    if len(manifest.files) > MAX_FILES or sum(records.values()) > MAX_RECORDS_BYTES:
        raise DamagedArchive("it holds more records than a run has")
    if sum(file.size_bytes for file in manifest.files) - sum(records.values()) > weights_allowed:
        most = f"{weights_allowed} bytes, the most that this base model's can be"
        raise DamagedArchive(f"its weights are larger than {most}")


def _mark_artifact(experiment: ExperimentDir, manifest: EvidenceManifest) -> None:
    """Write the manifest that intake writes into an accepted copy, so that it is verified and loaded as one."""
    if manifest.weights is not None:
        folder = experiment.artifacts / manifest.weights.content_hash
        if not folder.is_dir():
            raise DamagedArchive("it names weights and holds none")
        atomic.write_json(folder / artifacts.READY_NAME, {"not_in_hash": list(manifest.weights.not_in_hash)})


# --- checks against this machine's task and base model

WIDEST_BYTES = 4  # Bytes per value: a checkpoint may be float32 whatever the base model is

HEADERS_BYTES = 128 * 1024 * 1024


def weights_allowed(root: Root, manifest: EvidenceManifest) -> int:
    """Return the largest size in bytes of a checkpoint of this base model; a tied head may be stored twice. Raises
    AutorlError: the base model is not staged here, or has other weights."""
    name, wanted = manifest.base_model, manifest.base_model_content_hash
    if verify_model(root, name).content_hash != wanted:
        what = f"the base model {name} that is staged here has other weights than the one of the run"
        raise AutorlError(what, where=root.model(name), next_step=f"stage the revision with content hash {wanted}")
    sizes = [math.prod(tensor.shape) for tensor in tensors_of(root.model(manifest.base_model))]
    return WIDEST_BYTES * (sum(sizes) + max(sizes, default=0)) + HEADERS_BYTES


def check_task(root: Root, record: RunRecord) -> list[str]:
    """Check that this machine's task equals the run's; return notes. Raises AutorlError: task, split, recipe or scorer
    differ here, or nothing is staged."""
    science = record.science
    task = with_pins(root, load_task(science.task, root=root))
    verify_staged_task(root, task)
    local = task.file.splits["report"]
    if science.protocol is Protocol.PAPER and task.file.paper is not None:
        local = task.file.paper
    if science.splits.get(Split.REPORT) != local:
        raise _other("report split", task.folder / "task.yaml", "held-out items")
    recipe = with_scorer_hash(task.recipe(science.recipe.name), task.folder)
    if recipe.scorer == science.recipe.scorer and recipe.scorer_version != science.recipe.scorer_version:
        which = "an older version" if science.recipe.scorer_version < recipe.scorer_version else "another version"
        raise AutorlError(
            f"{which}: the run's scores are of version {science.recipe.scorer_version} of the scorer `{recipe.scorer}`, which "
            f"is {recipe.scorer_version} here; the two do not compare, and nothing speaks against the run",
            where=task.folder / "task.yaml",
            next_step="rescore it with the version of autorl-hpc that it was launched with, which `run.json` names",
        )
    if _unjudged(science.recipe, recipe) != recipe:
        raise _other(f"recipe {recipe.name}", task.folder / "task.yaml", "prompt, limits, scorer or options")
    if record.recipe_hash != science.recipe.hash():
        raise AutorlError("run.json names a recipe_hash that its recipe doesn't have", exit_code=Exit.FAILED)
    scorer(recipe.scorer, recipe.scorer_version, science.task)
    notes = []
    if task.hash() != record.task_hash:
        notes.append("the task's folder differs from the one that ran, in files that decide neither items nor recipe")
    if science.recipe.judge != "none":
        judge = science.recipe.options.get(JUDGE_MODEL)
        notes.append(f"outcomes come of the judge {judge}, as the run's recipe names it")
    return notes


def _unjudged(recipe: Recipe, local: Recipe) -> Recipe:
    """Return the run's recipe without the judge options that its launch added."""
    if local.judge == "none":
        return recipe
    written = {JUDGE_MODEL, JUDGE_PARAMETERS} - set(local.options)
    options = {name: value for name, value in recipe.options.items() if name not in written}
    return recipe.model_copy(update={"options": options})


def _other(what: str, where: Path, differs: str) -> AutorlError:
    return AutorlError(
        f"the run's {what} is not the one of the task here: other {differs}",
        where=where,
        next_step="use the version of autorl-hpc, and of the task, that the run was launched with",
    )


def judge_spec(recipe: Recipe, url: str | None, key: Path | None) -> JudgeSpec | None:
    """Return the recipe's judge at the address that the user passed; a bundle's own address is never used. Raises
    AutorlError: a judge is needed and no address was passed."""
    model = recipe.options.get(JUDGE_MODEL)
    if recipe.judge == "none" or model == JudgeSpec.BUILTIN:
        return None
    if url is None:
        advice = "say where it answers: --judge-url http://HOST:PORT/v1, with --judge-key FILE where it wants a key"
        raise AutorlError(f"this run's answers are judged by {model}", next_step=advice)
    key_file = None if key is None else str(key.absolute())
    try:
        parameters = json.loads(str(recipe.options.get(JUDGE_PARAMETERS, "{}")))
        return JudgeSpec(url=url, model=str(model), key_file=key_file, parameters=parameters)
    except (ValueError, RecursionError) as error:
        raise AutorlError(f"the judge can't be asked: {error}", next_step="correct --judge-url") from None


def check_shapes(root: Root, base_model: str, weights: Path, not_in_hash: tuple[str, ...]) -> str | None:
    """Return what is wrong with names and shapes of the weights; None if they are the base model's. Raises Refused: a
    file is not a safetensors file."""
    wanted = {tensor.name: tensor.shape for tensor in tensors_of(root.model(base_model))}
    for tensor in tensors_of(weights):
        if tensor.name in not_in_hash and tensor.name not in wanted:
            continue  # a copy of a tied tensor: the engine compares it
        if wanted.get(tensor.name) != tensor.shape:
            return f"tensor {tensor.name[:100]!r} does not have the shape of the base model's"
    return None
