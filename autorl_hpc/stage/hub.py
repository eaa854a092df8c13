"""Base models from the Hugging Face Hub at one revision: safetensors, config and tokenizer; never code, never pickles.

The Hub is asked once which files the revision has, how large they are and what their hashes are:
`/api/models/ORG/NAME/revision/REVISION?blobs=true` gives `sha` (the commit) and `siblings` with `rfilename`, `size`,
`blobId` (the file's name in git) and, for large files, `lfs.sha256`.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.atomic import TEMPORARY_PREFIX, unlink_quietly
from autorl_hpc.files.checkpoint import INDEX_NAME, SINGLE_NAME
from autorl_hpc.files.layout import Root
from autorl_hpc.stage.download import PATIENCE, Patience, Pin, fetch
from autorl_hpc.stage.progress import Say, in_words
from autorl_hpc.stage.sources import REVISION_PATTERN, Address, hub_file, hub_url
from autorl_hpc.stage.space import check_space
from autorl_hpc.stage.web import NoNetwork

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_INFO_BYTES = 64 * 1024 * 1024
DEFAULT_REVISION = "main"


@dataclass(frozen=True)
class HubModel:
    """What the Hub has of a model at one commit: the files that are taken, by name."""

    name: str
    commit: str
    licence: str | None
    files: dict[str, Pin]


def split_revision(name: str) -> tuple[str, str | None]:
    """`ORG/NAME@REVISION` as name and revision.

    Raises:
        AutorlError: what follows the @ is no revision.
    """
    model, at, revision = name.partition("@")
    if at and not re.fullmatch(REVISION_PATTERN, revision):
        raise AutorlError(
            f"{revision!r} is no revision: a commit, tag or branch of letters, digits, `.`, `_` and `-`",
            next_step="give the commit, as the model's page shows it: autorl-hpc stage ORG/NAME@COMMIT",
        )
    return model, revision if at else None


def fetch_model(
    root: Root,
    name: str,
    revision: str | None,
    kept: tuple[str, ...],
    *,
    say: Say = lambda _: None,
    patience: Patience = PATIENCE,
) -> tuple[HubModel, Path]:
    """The model's files in a folder of the store's own, `store/.sources/models/NAME@COMMIT/`.

    Args:
        kept: names of files that are taken beside the weights.

    Raises:
        NoNetwork, AutorlError: see `fetch`; or the Hub has no safetensors of it.
    """
    base = root.store / ".sources" / "models"
    base.mkdir(parents=True, exist_ok=True)
    try:
        found = _ask(base, name, revision, kept, say, patience)
        folder = base / f"{name}@{found.commit}"
        folder.mkdir(parents=True, exist_ok=True)

        def take(file: str) -> None:
            fetch(hub_file(name, found.commit, file), folder / file, found.files[file], say=say, patience=patience)

        if INDEX_NAME in found.files:
            take(INDEX_NAME)
        files = _one_save(found, folder)
        size_bytes = sum(found.files[file].size_bytes or 0 for file in files)
        say(f"{name}: revision {found.commit}, {len(files)} files, {in_words(size_bytes)}")
        check_space(folder, size_bytes - _there_bytes(folder), f"the model {name}")
        for file in files:
            take(file)
    except NoNetwork as error:
        raise NoNetwork(
            error.what,
            where=error.where,
            fault=error.fault,
            next_step=f"either run it where there is network, most often on the login node: autorl-hpc stage {name}\n"
            f"         or get the model's folder elsewhere (`hf download {name} --revision {revision or 'COMMIT'} --local-dir DIR`) "
            f"and run: autorl-hpc stage {name} --from DIR\n"
            f"         or make a bundle elsewhere: autorl-hpc stage {name} --bundle FILE.tar.gz; here: --from FILE.tar.gz",
            exit_code=Exit.ENVIRONMENT,
        ) from None
    return found, folder


def remove_model_sources(folder: Path) -> None:
    """Frees what was downloaded of one revision."""
    shutil.rmtree(folder, ignore_errors=True)


def _there_bytes(folder: Path) -> int:
    """Of this model, on disk already: whole files and unfinished ones."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _ask(base: Path, name: str, revision: str | None, kept: tuple[str, ...], say: Say, patience: Patience) -> HubModel:
    asked = revision or DEFAULT_REVISION
    address = Address(f"{hub_url()}/api/models/{name}/revision/{quote(asked, safe='')}?blobs=true", hub=True)
    answer = base / f"{name.replace('/', '--')}.json"
    say(f"{name}: asking {hub_url()} for revision {asked}")
    unlink_quietly(answer.with_name(f"{TEMPORARY_PREFIX}{answer.name}.part"))  # the answer may be another one by now
    try:
        fetch(address, answer, say=say, patience=patience)
        data = answer.read_bytes() if answer.stat().st_size <= MAX_INFO_BYTES else b""
    finally:
        unlink_quietly(answer)
    try:
        return _read_answer(json.loads(data), name, asked, kept)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AutorlError(
            f"the answer of the Hub about {name} can't be read: {type(error).__name__}: {error}"[:300],
            where=address.shown,
            next_step="check $HF_ENDPOINT, if you set it; else get the model's folder in another way: --from DIR",
            exit_code=Exit.ENVIRONMENT,
        ) from None


def _read_answer(value: Any, name: str, asked: str, kept: tuple[str, ...]) -> HubModel:
    commit = value["sha"]
    if not COMMIT.fullmatch(commit) or (COMMIT.fullmatch(asked) and asked != commit):
        raise ValueError(f"it speaks of revision {str(commit)[:60]!r}, asked was for {asked}")
    pins = {row["rfilename"]: _pin(row) for row in value["siblings"] if _is_kept(row["rfilename"], kept)}
    licence = (value.get("cardData") or {}).get("license")
    return HubModel(name, commit, licence if isinstance(licence, str) else None, dict(sorted(pins.items())))


def _is_kept(file: str, kept: tuple[str, ...]) -> bool:
    """Files of the model's own folder alone: others, such as `original/` or `onnx/`, are other saves of it."""
    return file in kept or (file.endswith(".safetensors") and re.fullmatch(r"[A-Za-z0-9][\w.-]*", file) is not None)


def _one_save(found: HubModel, folder: Path) -> list[str]:
    """The files to take: one save of the weights, of those that a repository may hold beside each other.

    Raises:
        AutorlError: there is none.
    """
    rest = [file for file in found.files if not file.endswith(".safetensors") and file != INDEX_NAME]
    if "config.json" in rest and SINGLE_NAME in found.files:  # which transformers looks for first, too
        return [*rest, SINGLE_NAME]
    if "config.json" in rest and INDEX_NAME in found.files:
        return [*rest, INDEX_NAME, *_shards(found, folder / INDEX_NAME)]
    raise AutorlError(
        f"{found.name} has no config.json with {SINGLE_NAME} or {INDEX_NAME} at revision {found.commit[:12]}",
        where=f"{hub_url()}/{found.name}/tree/{found.commit}",
        next_step="pickles are not taken: convert the model, save it with save_pretrained(..., safe_serialization=True), "
        "and stage that folder with --from DIR",
    )


def _shards(found: HubModel, index: Path) -> list[str]:
    """The shards that the index names.

    Raises:
        AutorlError: it can't be read, or names a file that the Hub doesn't list.
    """
    try:
        named = sorted({str(file) for file in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        named = []
    missing = [file for file in named if file not in found.files or not file.endswith(".safetensors")]
    if missing or not named:
        raise AutorlError(
            f"{INDEX_NAME} of {found.name} names {f'{missing[0][:100]!r}, which is not there' if missing else 'no shard'}",
            where=f"{hub_url()}/{found.name}/tree/{found.commit}",
            next_step="choose another revision, or tell the model's authors",
        )
    return named


def _pin(row: dict[str, Any]) -> Pin:
    """What the Hub says of a file.

    Raises:
        ValueError, KeyError, TypeError: it says nothing that could be checked.
    """
    size, lfs = row["size"], row.get("lfs")
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"no size of {row['rfilename']}")
    if lfs:
        if not SHA256.fullmatch(lfs["sha256"]):
            raise ValueError(f"no sha256 of {row['rfilename']}")
        return Pin(sha256=lfs["sha256"], size_bytes=size)
    if not COMMIT.fullmatch(row["blobId"]):
        raise ValueError(f"no git hash of {row['rfilename']}")
    return Pin(git_sha1=row["blobId"], size_bytes=size)
