"""Download one file, or a model of the Hugging Face Hub: go on where it broke off (`.tmp-NAME.part`), check hashes, name only
what is whole."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.files import atomic
from autorl_hpc.files.checkpoint import CHUNK_BYTES, INDEX_NAME, SINGLE_NAME, file_sha256
from autorl_hpc.files.layout import Root
from autorl_hpc.files.progress import bar
from autorl_hpc.stage import sources
from autorl_hpc.stage.sources import HttpSource, Say, hub_url, in_words
from autorl_hpc.states import Fault

PASSING_CODES = frozenset({408, 416, 425, 429, 500, 502, 503, 504})
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LONGEST_PAUSE_S = 60.0
NO_WAY_TRIES = 2  # where the host was never reached: a node without network should say so soon
WORTH_BYTES = 1024 * 1024  # a connection that brought as much counts as a new beginning


@dataclass(frozen=True)
class Pin:
    """What is known of a file beforehand. `git_sha1` is the blob's name in git, of small files."""

    sha256: str | None = None
    git_sha1: str | None = None
    size_bytes: int | None = None

    @property
    def hashed(self) -> bool:
        return self.sha256 is not None or self.git_sha1 is not None

    def differs(self, path: Path) -> str | None:
        """Return in words how the file differs, with both hashes; None: it is the pinned one."""
        size = path.stat().st_size
        if self.size_bytes not in (None, size):
            return f"has {size} bytes, expected are {self.size_bytes}"
        if self.sha256 is not None and (made := file_sha256(path)) != self.sha256:
            return f"has sha256 {made}, expected is {self.sha256}"
        if self.git_sha1 is not None:
            made = hashlib.sha1(b"blob %d\0" % size + path.read_bytes(), usedforsecurity=False).hexdigest()
            return None if made == self.git_sha1 else f"has git hash {made}, expected is {self.git_sha1}"
        return None


@dataclass(frozen=True)
class Patience:
    tries: int = 6  # in a row without WORTH_BYTES of new data
    timeout_s: float = 30.0  # without a byte
    pause_s: float = 1.0  # the first one, doubled each time
    longest_wait_s: float = 330.0  # that a server may ask for; the Hub counts over five minutes


NO_PIN = Pin()
PATIENCE = Patience()


class NoNetwork(AutorlError):
    """This node can't reach the source."""


def elsewhere(name: str, by_hand: str) -> str:
    """Return the advice for a node without network: by hand into a folder DIR, or by a bundle."""
    command = f"autorl-hpc stage {name}"
    return (
        f"either run it where there is network, most often on the login node: {command}\n"
        f"         or {by_hand} and run: {command} --from DIR\n"
        f"         or make a bundle elsewhere: {command} --bundle FILE.tar.gz; here: --from FILE.tar.gz"
    )


class TransientFailure(Exception):
    """A failure that may pass; `answered`: by the server, which asks to be left alone for `wait_s`."""

    def __init__(self, what: str, wait_s: float = 0.0, answered: bool = True) -> None:
        super().__init__(what)
        self.wait_s = wait_s
        self.answered = answered


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects, but never from https to http, and take the token to no other host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme == "http"):
            what = f"{old.hostname} redirects to {new.scheme}://{new.hostname}: from https only https is followed"
            raise _final(what, req.full_url.partition("?")[0])
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if following is not None and token is not None and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            following.add_unredirected_header("Authorization", token)
        return following


def _final(what: str, where: str, next_step: str = "") -> AutorlError:
    advice = next_step or "fetch the file in another way and stage it with --from DIR"
    return AutorlError(what, where=where, next_step=advice, exit_code=Exit.ENVIRONMENT)


def fetch(
    address: HttpSource, target: Path, pin: Pin = NO_PIN, *, say: Say = lambda _: None, patience: Patience = PATIENCE
) -> None:
    """Download `address` to `target`, whose folder must exist. A file that is there is taken if it is the pinned one. Raises
    NoNetwork; AutorlError: it is not there, not the pinned file, too large for the disk, or broke off too often."""
    part, lock = (target.with_name(f"{atomic.TEMPORARY_PREFIX}{target.name}.{end}") for end in ("part", "lock"))
    try:
        if pin.hashed and target.is_file() and pin.differs(target) is None:
            return
        with sources.alone(lock, "downloading this file"):
            if not pin.hashed:  # parts are joined only where a hash tells whether they make the whole
                part.unlink(missing_ok=True)
            if not part.exists() or pin.differs(part) is not None:
                _patiently(address, target.name, part, pin, say, patience)
            if wrong := pin.differs(part):
                part.unlink()
                what = f"{target.name} as it was downloaded {wrong}: altered, or another version of it"
                advice = "run the same command again; if it stays so, a proxy or mirror on the way may alter files"
                raise AutorlError(what, where=address.shown, next_step=advice, exit_code=Exit.FAILED)
            os.replace(part, target)
            atomic.fsync_directory(target.parent)
    except OSError as error:
        raise from_os_error(error, f"downloading {target.name}", error.filename or target) from error
    finally:
        lock.unlink(missing_ok=True)


def _patiently(address: HttpSource, name: str, part: Path, pin: Pin, say: Say, patience: Patience) -> None:
    failures, answered = 0, False
    kind: type[AutorlError]
    while True:
        before = _size(part)
        if before:
            say(f"{name}: going on at {in_words(before)}")
        try:
            return _once(address, name, part, pin, say, patience.timeout_s)
        except TransientFailure as trouble:
            failures = 1 if _size(part) - before >= WORTH_BYTES else failures + 1
            answered |= trouble.answered
            if not answered and failures >= NO_WAY_TRIES:
                what = f"this node can't reach {urlsplit(address.url).hostname}: {trouble}"
                advice = (
                    "stage on the login node; or fetch the files elsewhere and stage them with --from DIR or BUNDLE"
                )
                kind = NoNetwork
            elif failures >= patience.tries or trouble.wait_s > patience.longest_wait_s:
                asks = f" and asks to wait {trouble.wait_s:.0f} s" if trouble.wait_s else ""
                what = f"{name} could not be downloaded: {trouble}{asks} ({failures} tries)"
                advice = "run the same command again, later if need be: it goes on where it stopped"
                kind = AutorlError
            else:
                wait_s = max(trouble.wait_s, min(LONGEST_PAUSE_S, patience.pause_s * 2 ** (failures - 1)))
                say(f"{name}: {trouble}; again in {wait_s:.0f} s")
                time.sleep(wait_s)
                if not pin.hashed:
                    part.unlink(missing_ok=True)
                continue
            error = kind(what, where=address.shown, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)
            raise error from None


def _once(address: HttpSource, name: str, part: Path, pin: Pin, say: Say, timeout_s: float) -> None:
    """Make one request, to the end of the file."""
    have = _size(part)
    with _open(address, part, timeout_s) as response:
        if have and not re.match(rf"bytes {have}-", response.headers.get("Content-Range", "")):
            say(f"{name}: the server gives it whole or not at all; from the start")
            part.unlink()
            have = 0
            if response.status == 206:
                raise TransientFailure("the server goes on at another place than it was asked for")
        announced = response.headers.get("Content-Length")
        total = have + int(announced) if announced else pin.size_bytes
        if total is not None:
            sources.check_space(part.parent, total - have, name)
        shown = sources.progress(name, say)
        with open(part, "ab") as file, bar(f"downloading {name}", total) as advance:
            advance(have)
            while pin.size_bytes is None or have <= pin.size_bytes:  # at most to the first chunk beyond it
                try:
                    data = response.read1(CHUNK_BYTES)
                except (OSError, http.client.HTTPException) as error:
                    raise TransientFailure(_words(error)) from None
                if not data:
                    break
                have += file.write(data)
                advance(len(data))
                shown(have, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and have < total:
        raise TransientFailure(f"the connection broke off at {have} of {total} bytes")


def _open(address: HttpSource, part: Path, timeout_s: float, token: str | None = None) -> http.client.HTTPResponse:
    """Ask for the file from the part's end on. The token is shown to the Hub alone, and only once the Hub has asked for one."""
    headers = {"User-Agent": f"autorl-hpc/{__version__}", "Accept-Encoding": "identity"}
    if have := _size(part):
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(address.url, headers=headers)
    if token is not None:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:  # by the proxies of the environment
        response: http.client.HTTPResponse = urllib.request.build_opener(Redirects).open(request, timeout=timeout_s)
        return response
    except urllib.error.HTTPError as error:
        with error:
            parts = urlsplit(address.url)
            safe = address.hub and (parts.scheme == "https" or parts.hostname in LOOPBACK)
            if error.code in (401, 403) and token is None and safe and (token := sources.hub_token()) is not None:
                return _open(address, part, timeout_s, token)
            if error.code == 416:  # the part is not of this file
                part.unlink(missing_ok=True)
            if error.code in PASSING_CODES:
                wait = error.headers.get("Retry-After", "")
                told = f"the server answers {error.code}"
                raise TransientFailure(told, float(wait) if wait.isdigit() else 0.0) from None
            what = f"the server answers {error.code}"
            advice = "check name and revision" if error.code in (404, 410) else ""
            if error.code in (401, 403) and address.hub:
                what += ": there is no such file on the Hub, or it is gated and your token doesn't open it"
                place = "the file that $HF_TOKEN_PATH names, or ~/.cache/huggingface/token"
                advice = f"check the name; accept the model's terms on its page, and have a token in {place}"
            raise _final(what, address.shown, advice) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            what = f"the server's certificate can't be verified: {reason.verify_message}"
            advice = "behind a proxy that signs anew: set SSL_CERT_FILE to your site's certificates"
            raise _final(what, address.shown, advice) from None
        raise TransientFailure(_words(reason), answered=False) from None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _words(error: Any) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)[:200]


# --- base models of the Hub at one revision: safetensors, config and tokenizer; never code, never pickles

COMMIT = re.compile(r"[0-9a-f]{40}")
WEIGHTS = re.compile(r"[A-Za-z0-9][\w.-]*\.safetensors")  # none of a subfolder, which holds another save of the model


@dataclass(frozen=True)
class HubModel:
    """What the Hub has of a model at one commit: the files that may be taken, by name."""

    name: str
    commit: str
    licence: str | None
    files: dict[str, Pin]


def split_revision(name: str) -> tuple[str, str | None]:
    """Split `ORG/NAME@REVISION` into name and revision. Raises AutorlError: it is not a revision."""
    model, at, revision = name.partition("@")
    if at and not re.fullmatch(sources.REVISION_PATTERN, revision):
        what = f"{revision!r} is not a revision: a commit, tag or branch of letters, digits, `.`, `_` and `-`"
        raise AutorlError(what, next_step="give the commit, as its page shows it: autorl-hpc stage ORG/NAME@COMMIT")
    return model, revision if at else None


def fetch_model(
    root: Root, name: str, revision: str | None, kept: tuple[str, ...], *, say: Say
) -> tuple[HubModel, Path]:
    """Download a model into `.sources/models/NAME@COMMIT/` of the store; return what it is, and the folder. `kept`: names of files
    beside the weights. Raises as `fetch`; AutorlError: the Hub has no safetensors of it."""
    base = root.store / ".sources" / "models"
    base.mkdir(parents=True, exist_ok=True)
    try:
        found = _ask(base, name, revision or "main", kept, say)
        folder = base / f"{name}@{found.commit}"
        folder.mkdir(parents=True, exist_ok=True)

        def take(file: str) -> None:
            fetch(sources.hub_file(name, found.commit, file), folder / file, found.files[file], say=say)

        if INDEX_NAME in found.files:
            take(INDEX_NAME)
        files = _one_save(found, folder)
        size_bytes = sum(found.files[file].size_bytes or 0 for file in files)
        say(f"{name}: revision {found.commit}, {len(files)} files, {in_words(size_bytes)}")
        there = sum(path.stat().st_size for path in folder.iterdir())
        sources.check_space(folder, size_bytes - there, f"the model {name}")
        for file in files:
            take(file)
    except NoNetwork as error:
        get = f"`hf download {name} --revision {revision or 'COMMIT'} --local-dir DIR`"
        error.next_step = elsewhere(name, f"get the model's folder elsewhere ({get})")
        raise
    return found, folder


def _ask(base: Path, name: str, revision: str, kept: tuple[str, ...], say: Say) -> HubModel:
    address = HttpSource(f"{hub_url()}/api/models/{name}/revision/{quote(revision, safe='')}?blobs=true", hub=True)
    answer = base / f"{name.replace('/', '--')}.json"
    say(f"{name}: asking {hub_url()} for revision {revision}")
    try:
        fetch(address, answer, say=say)
        value = json.loads(answer.read_bytes())
        commit, licence = value["sha"], (value.get("cardData") or {}).get("license")
        if not COMMIT.fullmatch(commit) or (COMMIT.fullmatch(revision) and revision != commit):
            raise ValueError(f"it speaks of revision {str(commit)[:60]!r}, asked was for {revision}")
        rows = {row["rfilename"]: row for row in value["siblings"]}
        pins = {file: _pin(row) for file, row in sorted(rows.items()) if file in kept or WEIGHTS.fullmatch(file)}
        return HubModel(name, commit, licence if isinstance(licence, str) else None, pins)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"the answer of the Hub about {name} can't be read: {type(error).__name__}: {error}"[:300]
        advice = "check $HF_ENDPOINT, if you set it; else get the model's folder in another way: --from DIR"
        raise AutorlError(what, where=address.shown, next_step=advice, exit_code=Exit.ENVIRONMENT) from None
    finally:
        atomic.unlink_quietly(answer)


def _pin(row: dict[str, Any]) -> Pin:
    """Return what the Hub says of a file: the sha256 of a large one, else its name in git."""
    size, lfs = int(row["size"]), row.get("lfs")
    hashed = lfs["sha256"] if lfs else row["blobId"]
    if not re.fullmatch(r"[0-9a-f]{64}" if lfs else r"[0-9a-f]{40}", hashed):
        raise ValueError(f"no hash of {row['rfilename']}")
    return Pin(sha256=hashed, size_bytes=size) if lfs else Pin(git_sha1=hashed, size_bytes=size)


def _one_save(found: HubModel, folder: Path) -> list[str]:
    """Return the files to take: one save of the weights. Raises AutorlError: there is none, or the index names a missing file."""
    where = f"{hub_url()}/{found.name}/tree/{found.commit}"
    rest = [file for file in found.files if not file.endswith(".safetensors") and file != INDEX_NAME]
    if "config.json" in rest and SINGLE_NAME in found.files:  # which transformers looks for first, too
        return [*rest, SINGLE_NAME]
    if "config.json" not in rest or INDEX_NAME not in found.files:
        what = f"{found.name} has no config.json with {SINGLE_NAME} or {INDEX_NAME} at revision {found.commit[:12]}"
        advice = "pickles are not taken: save it with save_pretrained(..., safe_serialization=True), and stage with --from DIR"
        raise AutorlError(what, where=where, next_step=advice)
    try:
        weights = json.loads((folder / INDEX_NAME).read_bytes())["weight_map"]
        named = sorted({str(file) for file in weights.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        named = []
    missing = [file for file in named if file not in found.files or not file.endswith(".safetensors")]
    if missing or not named:
        wrong = f"{missing[0][:100]!r}, which is not there" if missing else "no shard"
        advice = "choose another revision, or tell the model's authors"
        raise AutorlError(f"{INDEX_NAME} of {found.name} names {wrong}", where=where, next_step=advice)
    return [*rest, INDEX_NAME, *named]
