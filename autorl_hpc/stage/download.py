"""Download one file, or a model of the Hugging Face Hub: go on where it broke off, check hashes, name only what is whole.

The unfinished file lies beside its place as `.tmp-NAME.part` and is kept for the next try.
"""

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
from typing import IO, Any
from urllib.parse import quote, urlsplit

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.files import atomic
from autorl_hpc.files.checkpoint import CHUNK_BYTES, INDEX_NAME, SINGLE_NAME
from autorl_hpc.files.layout import Root
from autorl_hpc.stage.sources import (
    REVISION_PATTERN,
    HttpSource,
    Say,
    alone,
    check_space,
    hub_file,
    hub_token,
    hub_url,
    in_words,
    progress,
)
from autorl_hpc.states import Fault

PASSING_CODES = frozenset({408, 416, 425, 429, 500, 502, 503, 504})
LOOPBACK = ("127.0.0.1", "localhost", "::1")
OTHER_WAY = "fetch the file in another way and stage it with --from DIR"


@dataclass(frozen=True)
class Pin:
    """What is known of a file beforehand. `git_sha1` is the blob's name in git and needs `size_bytes`."""

    sha256: str | None = None
    git_sha1: str | None = None
    size_bytes: int | None = None

    @property
    def hashed(self) -> bool:
        return self.sha256 is not None or self.git_sha1 is not None


@dataclass(frozen=True)
class Patience:
    """How a download bears failures.

    Attributes:
        tries: in a row without `WORTH_BYTES` of new data.
        timeout_s: without a byte.
        first_pause_s, longest_pause_s: between tries; doubled each time.
        longest_wait_s: that a server may ask for by Retry-After; the Hub's limits are counted over five minutes.
    """

    tries: int = 6
    timeout_s: float = 30.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    longest_wait_s: float = 330.0


NO_PIN = Pin()
PATIENCE = Patience()
NO_WAY_TRIES = 2  # where the host was never reached: a node without network should say so soon
WORTH_BYTES = 1024 * 1024
"""A connection that brought as much counts as a new beginning: long downloads may break as often as they like."""


class NoNetwork(AutorlError):
    """This node can't reach the source."""


class TransientFailure(Exception):
    """A failure that may pass; `wait_s`: for how long the server asks to be left alone."""

    def __init__(self, what: str, wait_s: float = 0.0) -> None:
        super().__init__(what)
        self.wait_s = wait_s


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects, but never from https to http, and take the token to no other host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme == "http"):
            what = f"{old.hostname} redirects to {new.scheme}://{new.hostname}: from https only https is followed"
            where = req.full_url.partition("?")[0]
            raise AutorlError(what, where=where, next_step=OTHER_WAY, exit_code=Exit.ENVIRONMENT)
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if following is not None and token is not None and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            following.add_unredirected_header("Authorization", token)
        return following


class Hashes:
    """The hashes of a growing file."""

    def __init__(self, pin: Pin = NO_PIN, file: IO[bytes] | None = None) -> None:
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % (pin.size_bytes or 0), usedforsecurity=False)
        self.size_bytes = 0
        while file is not None and (data := file.read(CHUNK_BYTES)):
            self.update(data)

    def update(self, data: bytes) -> None:
        self._sha256.update(data)
        self._git.update(data)
        self.size_bytes += len(data)

    def differ_from(self, pin: Pin) -> str | None:
        """Return how in words, with both hashes; None: it is the pinned file."""
        if pin.size_bytes not in (None, self.size_bytes):
            return f"has {self.size_bytes} bytes, expected are {pin.size_bytes}"
        for kind, own, wanted in (("sha256", self._sha256, pin.sha256), ("git hash", self._git, pin.git_sha1)):
            if wanted not in (None, own.hexdigest()):
                return f"has {kind} {own.hexdigest()}, expected is {wanted}"
        return None


def fetch(
    address: HttpSource, target: Path, pin: Pin = NO_PIN, *, say: Say = lambda _: None, patience: Patience = PATIENCE
) -> None:
    """Download `address` to `target`, whose folder must exist. A file that is there is taken if it is the pinned one.

    Raises:
        NoNetwork: the host can't be reached from here.
        AutorlError: it is not there, not the pinned file, too large for the disk, or broke off too often.
    """
    part, lock = (target.with_name(f"{atomic.TEMPORARY_PREFIX}{target.name}.{end}") for end in ("part", "lock"))
    try:
        if pin.hashed and target.is_file():
            with open(target, "rb") as file:
                if Hashes(pin, file).differ_from(pin) is None:
                    return
        with alone(lock, "downloading this file"):
            try:
                with open(part, "a+b") as file:
                    Download(address, target.name, pin, file, say, patience).run()
                    os.fsync(file.fileno())
                os.replace(part, target)
                atomic.fsync_directory(target.parent)
            finally:
                lock.unlink()
                if part.exists() and not part.stat().st_size:
                    part.unlink()
    except OSError as error:
        raise from_os_error(error, f"downloading {target.name}", error.filename or target) from error


class Download:
    """One file on its way in; parts are joined only where a hash tells whether they make the whole."""

    def __init__(self, address: HttpSource, name: str, pin: Pin, file: IO[bytes], say: Say, patience: Patience) -> None:
        self.address, self.name, self.pin, self.file, self.say = address, name, pin, file, say
        self.patience = patience
        self._token: str | None = None
        self._opener = urllib.request.build_opener(Redirects)  # proxies: those of the environment
        self._answered = False
        file.seek(0)
        self.hashes = Hashes(pin, file)

    def run(self) -> None:
        """Bring in the whole file; it is emptied if it turns out to be another one."""
        if self.hashes.size_bytes and not self.pin.hashed:
            self._from_the_start()
        elif self.hashes.size_bytes and self.hashes.differ_from(self.pin) is None:
            return
        elif self.hashes.size_bytes:
            self.say(f"{self.name}: going on at {in_words(self.hashes.size_bytes)}")
        self._patiently()
        if wrong := self.hashes.differ_from(self.pin):
            self._from_the_start()
            what = f"{self.name} as it was downloaded {wrong}: altered, or another version of it"
            advice = "run the same command again; if it stays so, look for the file at its source under the pinned revision: a proxy or mirror on the way may alter files"
            raise AutorlError(what, where=self.address.shown, next_step=advice, exit_code=Exit.FAILED)

    def _patiently(self) -> None:
        failures, pause_s = 0, self.patience.first_pause_s
        while True:
            before = self.hashes.size_bytes
            try:
                self._once()
                return
            except TransientFailure as trouble:
                if self.hashes.size_bytes - before >= WORTH_BYTES:
                    failures, pause_s = 0, self.patience.first_pause_s
                failures += 1
                self._give_up_if(failures, trouble)
                wait_s = max(pause_s, trouble.wait_s)
                self.say(f"{self.name}: {trouble}; again in {wait_s:.0f} s")
                time.sleep(wait_s)
                pause_s = min(2 * pause_s, self.patience.longest_pause_s)
                if not self.pin.hashed:
                    self._from_the_start()

    def _give_up_if(self, failures: int, trouble: TransientFailure) -> None:
        asks = f" and asks to wait {trouble.wait_s:.0f} s" if trouble.wait_s else ""
        kind: type[AutorlError] = AutorlError
        what = f"{self.name} could not be downloaded: {trouble}{asks} ({failures} tries)"
        advice = "run the same command again, later if need be: it goes on where it stopped"
        if not self._answered and failures >= NO_WAY_TRIES:
            kind = NoNetwork
            what = f"this node can't reach {urlsplit(self.address.url).hostname}: {trouble}"
            advice = "compute nodes often have no network: stage on the login node; or fetch the files elsewhere and stage them with --from DIR, or with --from a bundle"
        elif failures < self.patience.tries and trouble.wait_s <= self.patience.longest_wait_s:
            return
        raise kind(what, where=self.address.shown, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)

    def _once(self) -> None:
        """Make one request, to the end of the file."""
        have = self.hashes.size_bytes
        with self._open(have) as response:
            announced = response.headers.get("Content-Length")
            if have and not re.match(rf"bytes {have}-", response.headers.get("Content-Range", "")):
                self.say(f"{self.name}: the server gives it whole or not at all; from the start")
                self._from_the_start()
                if response.status == 206:
                    raise TransientFailure("the server goes on at another place than it was asked for")
            total = self.hashes.size_bytes + int(announced) if announced else self.pin.size_bytes
            if total is not None:
                check_space(Path(self.file.name).parent, total - self.hashes.size_bytes, self.name)
            self._take(response, total)
        if total is not None and self.hashes.size_bytes < total:
            raise TransientFailure(f"the connection broke off at {self.hashes.size_bytes} of {total} bytes")

    def _take(self, response: http.client.HTTPResponse, total: int | None) -> None:
        """Append the body as it comes, at most to the first chunk beyond a known size."""
        limit = self.pin.size_bytes or float("inf")
        with progress(self.name, self.say) as shown:
            while self.hashes.size_bytes <= limit:
                try:
                    data = response.read1(CHUNK_BYTES)
                except (OSError, http.client.HTTPException) as error:
                    raise TransientFailure(_words(error)) from None
                if not data:
                    break
                self.file.write(data)
                self.hashes.update(data)
                shown(self.hashes.size_bytes, total)
        self.file.flush()

    def _open(self, have: int) -> http.client.HTTPResponse:
        """Ask for the file from a place on. The token is shown to the Hub alone, and only once the Hub has asked for one."""
        headers = {"User-Agent": f"autorl-hpc/{__version__}", "Accept-Encoding": "identity"}
        request = urllib.request.Request(self.address.url, headers=headers)
        if have:
            request.add_header("Range", f"bytes={have}-")
        if self._token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=self.patience.timeout_s)
        except urllib.error.HTTPError as error:
            self._answered = True
            with error:
                if error.code in (401, 403) and self._token is None and self._may_show_token():
                    self._token = hub_token()
                    if self._token is not None:
                        return self._open(have)
                raise self._refusal(error.code, error.headers.get("Retry-After", "")) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                what = f"the server's certificate can't be verified: {reason.verify_message}"
                advice = "behind a proxy that signs anew: set SSL_CERT_FILE to your site's certificates"
                raise self._never(what, advice) from None
            raise TransientFailure(_words(reason)) from None
        self._answered = True
        return response

    def _may_show_token(self) -> bool:
        parts = urlsplit(self.address.url)
        return self.address.hub and (parts.scheme == "https" or parts.hostname in LOOPBACK)

    def _refusal(self, code: int, retry_after: str) -> Exception:
        if code == 416:  # the part is not of this file
            self._from_the_start()
        if code in PASSING_CODES:
            return TransientFailure(f"the server answers {code}", float(retry_after) if retry_after.isdigit() else 0.0)
        if code in (401, 403) and self.address.hub:
            what = f"the Hub answers {code}: there is no such file, or it is gated and your token doesn't open it"
            advice = "check the name; accept the model's terms on its page, and have a token in the file that $HF_TOKEN_PATH names or in ~/.cache/huggingface/token"
            return self._never(what, advice)
        if code in (404, 410):
            return self._never(f"the server answers {code}: there is no such file", "check name and revision")
        return self._never(f"the server answers {code}", OTHER_WAY)

    def _never(self, what: str, next_step: str) -> AutorlError:
        return AutorlError(what, where=self.address.shown, next_step=next_step, exit_code=Exit.ENVIRONMENT)

    def _from_the_start(self) -> None:
        self.file.truncate(0)
        self.hashes = Hashes(self.pin)


def _words(error: Any) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)[:200]


# Base models of the Hub at one revision: safetensors, config and tokenizer; never code, never pickles. The Hub is asked once which
# files the revision has: `/api/models/ORG/NAME/revision/REVISION?blobs=true` gives `sha` (the commit) and `siblings` with
# `rfilename`, `size`, `blobId` (the file's name in git) and, for large files, `lfs.sha256`.

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
WEIGHTS = re.compile(r"[A-Za-z0-9][\w.-]*\.safetensors")
"""In the model's own folder alone: others, such as `original/` or `onnx/`, hold other saves of it."""


@dataclass(frozen=True)
class HubModel:
    """What the Hub has of a model at one commit: the files that may be taken, by name."""

    name: str
    commit: str
    licence: str | None
    files: dict[str, Pin]


def split_revision(name: str) -> tuple[str, str | None]:
    """Split `ORG/NAME@REVISION` into name and revision. Raises AutorlError if what follows the @ is not a revision."""
    model, at, revision = name.partition("@")
    if at and not re.fullmatch(REVISION_PATTERN, revision):
        what = f"{revision!r} is not a revision: a commit, tag or branch of letters, digits, `.`, `_` and `-`"
        raise AutorlError(what, next_step="give the commit, as its page shows it: autorl-hpc stage ORG/NAME@COMMIT")
    return model, revision if at else None


def fetch_model(
    root: Root, name: str, revision: str | None, kept: tuple[str, ...], *, say: Say, patience: Patience = PATIENCE
) -> tuple[HubModel, Path]:
    """Download a model into the store's folder `.sources/models/NAME@COMMIT/`; return what it is, and the folder. `kept` names the
    files that are taken beside the weights. Raises as `fetch`, or AutorlError if the Hub has no safetensors of it."""
    base = root.store / ".sources" / "models"
    base.mkdir(parents=True, exist_ok=True)
    try:
        found = _ask(base, name, revision or "main", kept, say, patience)
        folder = base / f"{name}@{found.commit}"
        folder.mkdir(parents=True, exist_ok=True)

        def take(file: str) -> None:
            fetch(hub_file(name, found.commit, file), folder / file, found.files[file], say=say, patience=patience)

        if INDEX_NAME in found.files:
            take(INDEX_NAME)
        files = _one_save(found, folder)
        size_bytes = sum(found.files[file].size_bytes or 0 for file in files)
        say(f"{name}: revision {found.commit}, {len(files)} files, {in_words(size_bytes)}")
        there = sum(path.stat().st_size for path in folder.iterdir())
        check_space(folder, size_bytes - there, f"the model {name}")
        for file in files:
            take(file)
    except NoNetwork as error:
        error.next_step = (
            f"either run it where there is network, most often on the login node: autorl-hpc stage {name}\n"
            f"         or get the model's folder elsewhere (`hf download {name} --revision {revision or 'COMMIT'} --local-dir DIR`) "
            f"and run: autorl-hpc stage {name} --from DIR\n"
            f"         or make a bundle elsewhere: autorl-hpc stage {name} --bundle FILE.tar.gz; here: --from FILE.tar.gz"
        )
        raise
    return found, folder


def _ask(base: Path, name: str, revision: str, kept: tuple[str, ...], say: Say, patience: Patience) -> HubModel:
    address = HttpSource(f"{hub_url()}/api/models/{name}/revision/{quote(revision, safe='')}?blobs=true", hub=True)
    answer = base / f"{name.replace('/', '--')}.json"
    say(f"{name}: asking {hub_url()} for revision {revision}")
    try:
        fetch(address, answer, say=say, patience=patience)
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
    """Return what the Hub says of a file, or raise if nothing of it could be checked."""
    size, lfs = row["size"], row.get("lfs")
    kind, hashed, form = ("sha256", lfs["sha256"], SHA256) if lfs else ("git hash", row["blobId"], COMMIT)
    if not isinstance(size, int) or size < 0 or not form.fullmatch(hashed):
        raise ValueError(f"no size or no {kind} of {row['rfilename']}")
    return Pin(sha256=hashed, size_bytes=size) if lfs else Pin(git_sha1=hashed, size_bytes=size)


def _one_save(found: HubModel, folder: Path) -> list[str]:
    """Return the files to take: one save of the weights, of those that a repository may hold beside each other. Raises
    AutorlError if there is none, or the index names a file that the Hub doesn't list."""
    where = f"{hub_url()}/{found.name}/tree/{found.commit}"
    rest = [file for file in found.files if not file.endswith(".safetensors") and file != INDEX_NAME]
    if "config.json" in rest and SINGLE_NAME in found.files:  # which transformers looks for first, too
        return [*rest, SINGLE_NAME]
    if "config.json" not in rest or INDEX_NAME not in found.files:
        what = f"{found.name} has no config.json with {SINGLE_NAME} or {INDEX_NAME} at revision {found.commit[:12]}"
        advice = "pickles are not taken: convert the model, save it with save_pretrained(..., safe_serialization=True), and stage that folder with --from DIR"
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
