"""Fetches one file: goes on where it broke off, hashes while it writes, and leaves under the file's name only what is whole.

The unfinished file lies beside its place as `.tmp-NAME.part`, and is kept for the next try; `.tmp-NAME.part.json` says which
version of the file it is a part of.
"""

from __future__ import annotations

import email.utils
import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.atomic import TEMPORARY_PREFIX, unlink_quietly
from autorl_hpc.files.checkpoint import CHUNK_BYTES, INDEX_NAME, SINGLE_NAME
from autorl_hpc.files.layout import Root
from autorl_hpc.stage.sources import (
    REVISION_PATTERN,
    HttpSource,
    Say,
    Shown,
    alone,
    check_space,
    hub_file,
    hub_token,
    hub_url,
    in_words,
    progress,
)
from autorl_hpc.states import Fault

# One HTTP request, and what its failing means: try again, no network, or never.

DOWNLOAD_CHUNK_BYTES = 1024 * 1024
PASSING_CODES = frozenset({408, 425, 429, 500, 502, 503, 504})
NO_WAY_ERRNOS = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ECONNREFUSED})
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class TransientFailure(Exception):
    """A failure that may pass.

    Args:
        wait_s: for how long the server asks to be left alone.
        no_way: the host was not even reached.
    """

    def __init__(self, what: str, *, wait_s: float | None = None, no_way: bool = False) -> None:
        super().__init__(what)
        self.wait_s = wait_s
        self.no_way = no_way


class OutOfRange(Exception):
    """The server has nothing at the place where the download was to go on (416).

    Args:
        total_bytes: of the whole file, where the server says so.
    """

    def __init__(self, total_bytes: int | None) -> None:
        super().__init__(total_bytes)
        self.total_bytes = total_bytes


class NoNetwork(AutorlError):
    """This node can't reach the source."""


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never from https to http, and takes the token to no other host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme == "http"):
            raise AutorlError(
                f"{old.hostname} redirects to {new.scheme}://{new.hostname}: from https only https is followed",
                where=req.full_url.partition("?")[0],
                next_step="fetch the file in another way and stage it with --from DIR",
                exit_code=Exit.ENVIRONMENT,
            )
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if following is not None and token is not None and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            following.add_unredirected_header("Authorization", token)
        return following


class Web:
    """Asks for one address; shows the Hub's token only once it was asked for one."""

    def __init__(self, address: HttpSource, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._token: str | None = None
        self._opener = urllib.request.build_opener(Redirects)  # proxies: those of the environment

    def open(self, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """The answer, 200 or 206.

        Raises:
            Passing, OutOfRange: see there.
            AutorlError: it will never go.
        """
        request = urllib.request.Request(
            self.address.url,
            headers={"User-Agent": f"autorl-hpc/{__version__}", "Accept-Encoding": "identity", **headers},
        )
        if self._token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (401, 403) and self._token is None and self._may_show_token():
                    self._token = hub_token()
                    if self._token is not None:
                        return self.open(headers)
                raise self._refusal(error.code, error.headers) from None
        except urllib.error.URLError as error:
            reason = error.reason
            raise self._of_connection(reason if isinstance(reason, OSError) else OSError(str(reason))) from None
        except (OSError, http.client.HTTPException) as error:
            raise TransientFailure(_words(error)) from None
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            response.close()
            raise self._never(f"the server sends it packed ({encoding}), though it was asked not to")
        return response

    def _may_show_token(self) -> bool:
        parts = urlsplit(self.address.url)
        return self.address.hub and (parts.scheme == "https" or parts.hostname in LOOPBACK)

    def _refusal(self, code: int, headers: Any) -> Exception:
        if code == 416:
            return OutOfRange(range_total(headers.get("Content-Range", "")))
        if code in PASSING_CODES:
            return TransientFailure(f"the server answers {code}", wait_s=retry_after_s(headers.get("Retry-After")))
        if code in (401, 403) and self.address.hub:
            return self._never(
                f"the Hub answers {code}: there is no such file, or it is gated and your token doesn't open it",
                "check the name; accept the model's terms on its page, and have a token in the file that $HF_TOKEN_PATH "
                "names or in ~/.cache/huggingface/token",
            )
        if code in (404, 410):
            return self._never(f"the server answers {code}: there is no such file", "check name and revision")
        return self._never(f"the server answers {code}")

    def _of_connection(self, error: OSError) -> Exception:
        if isinstance(error, ssl.SSLCertVerificationError):
            return self._never(
                f"the server's certificate can't be verified: {error.verify_message}",
                "behind a proxy that signs anew: set SSL_CERT_FILE to your site's certificates",
            )
        if str(error).startswith("Tunnel connection failed"):
            return TransientFailure(f"the proxy answers: {error}", no_way=True)
        no_way = isinstance(error, (socket.gaierror, TimeoutError)) or error.errno in NO_WAY_ERRNOS
        return TransientFailure(_words(error), no_way=no_way)

    def _never(
        self, what: str, next_step: str = "fetch the file in another way and stage it with --from DIR"
    ) -> AutorlError:
        return AutorlError(what, where=self.address.shown, next_step=next_step, exit_code=Exit.ENVIRONMENT)

    def no_network(self, what: str) -> NoNetwork:
        """For when the host can't be reached at all."""
        host = urlsplit(self.address.url).hostname
        return NoNetwork(
            f"this node can't reach {host}: {what}",
            where=self.address.shown,
            fault=Fault.CLUSTER,
            next_step="compute nodes often have no network: stage on the login node; or fetch the files elsewhere and stage them "
            "with --from DIR, or with --from a bundle",
            exit_code=Exit.ENVIRONMENT,
        )


def chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The body as it comes.

    Raises:
        Passing: the connection broke, or nothing came for too long.
    """
    while True:
        try:
            data = response.read1(DOWNLOAD_CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise TransientFailure(_words(error)) from None
        if not data:
            return
        yield data


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection broke off"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)[:200]


def retry_after_s(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for: it holds their number, or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def range_total(value: str) -> int | None:
    """The whole file's bytes of a header `Content-Range: bytes 0-9/10` or `bytes */10`."""
    total = value.rpartition("/")[2].strip()
    return int(total) if total.isascii() and total.isdigit() else None


def range_start(value: str) -> int | None:
    """The first byte's place of a header `Content-Range: bytes 5-9/10`."""
    start = value.strip().removeprefix("bytes").strip().partition("-")[0]
    return int(start) if start.isascii() and start.isdigit() else None


@dataclass(frozen=True)
class Pin:
    """What is known of a file beforehand.

    Attributes:
        git_sha1: the blob's name in git, sha1 over `blob SIZE\\0` and the data; needs `size_bytes`.
    """

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
        no_way_tries: where the host was never reached: a node without network should say so soon.
        timeout_s: without a byte.
        first_pause_s, longest_pause_s: between tries; doubled each time.
        longest_wait_s: that a server may ask for by Retry-After; the Hub's limits are counted over five minutes.
    """

    tries: int = 6
    no_way_tries: int = 2
    timeout_s: float = 30.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    longest_wait_s: float = 330.0


NO_PIN = Pin()
PATIENCE = Patience()
WORTH_BYTES = 1024 * 1024
"""A connection that brought as much counts as a new beginning: long downloads may break as often as they like."""


@dataclass(frozen=True)
class Fetched:
    """A file that came in whole."""

    sha256: str
    size_bytes: int


def fetch(
    address: HttpSource, target: Path, pin: Pin = NO_PIN, *, say: Say = lambda _: None, patience: Patience = PATIENCE
) -> Fetched:
    """Downloads `address` to `target`, whose folder must exist. A file that is there is taken if it is the pinned one.

    Raises:
        NoNetwork: the host can't be reached from here.
        AutorlError: it is not there, not the pinned file, too large for the disk, or broke off too often.
    """
    try:
        if pin.hashed and target.is_file():
            there = Hashes(pin)
            there.update_from(target)
            if there.differs_from(pin) is None:
                return Fetched(there.sha256, there.size_bytes)
        unfinished = target.with_name(f"{atomic.TEMPORARY_PREFIX}{target.name}.part")
        with alone(unfinished, "downloading this file") as fd, progress(target.name, say) as shown:
            download = Download(address, target, pin, unfinished, fd, say, shown, patience)
            try:
                return download.run()
            except BaseException:
                if not os.fstat(fd).st_size:  # nothing to go on with
                    download.discard()
                raise
    except OSError as error:
        raise from_os_error(error, f"downloading {target.name}", error.filename or target) from error


class Hashes:
    """The hashes of a growing file."""

    def __init__(self, pin: Pin = NO_PIN) -> None:
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % (pin.size_bytes or 0), usedforsecurity=False)
        self.size_bytes = 0

    def update(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        self._git.update(data)
        self.size_bytes += len(data)

    def update_from(self, path: Path) -> None:
        with open(path, "rb") as file:
            while data := file.read(CHUNK_BYTES):
                self.update(data)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def differs_from(self, pin: Pin) -> str | None:
        """In words, with both hashes; None: it is the pinned file."""
        if pin.size_bytes is not None and self.size_bytes != pin.size_bytes:
            return f"has {self.size_bytes} bytes, expected are {pin.size_bytes}"
        for kind, made, wanted in (
            ("sha256", self.sha256, pin.sha256),
            ("git hash", self._git.hexdigest(), pin.git_sha1),
        ):
            if wanted is not None and made != wanted:
                return f"has {kind} {made}, expected is {wanted}"
        return None


class Download:
    """One file on its way in; `run` is to be read top to bottom."""

    def __init__(
        self,
        address: HttpSource,
        target: Path,
        pin: Pin,
        part: Path,
        fd: int,
        say: Say,
        shown: Shown,
        patience: Patience,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.address, self.target, self.pin, self.part, self.fd = address, target, pin, part, fd
        self.say, self.shown, self.patience, self._sleep = say, shown, patience, sleep
        self.web = Web(address, patience.timeout_s)
        self.notes = part.with_name(part.name + ".json")
        self.total = pin.size_bytes
        self.hashes = Hashes(pin)
        self._answered = False
        self._joined = False  # of parts that came by more than one answer

    def run(self) -> Fetched:
        """See `fetch`."""
        self.hashes.update_from(self.part)
        if self.hashes.size_bytes:
            self._joined = True
            self.say(f"{self.target.name}: going on at {in_words(self.hashes.size_bytes)}")
        self._patiently()
        wrong = self.hashes.differs_from(self.pin)
        if wrong is not None and self._joined:
            self.say(f"{self.target.name}: the parts don't make the whole; from the start")
            self._from_the_start()
            self._joined = False
            self._patiently()
            wrong = self.hashes.differs_from(self.pin)
        if wrong is not None:
            self.discard()
            raise AutorlError(
                f"{self.target.name} as it was downloaded {wrong}: altered, or another version of it",
                where=self.address.shown,
                next_step="look for it at its source under the pinned revision; a proxy or mirror on the way may alter files",
                exit_code=Exit.FAILED,
            )
        os.fsync(self.fd)
        os.replace(self.part, self.target)
        atomic.fsync_directory(self.target.parent)
        atomic.unlink_quietly(self.notes)
        return Fetched(self.hashes.sha256, self.hashes.size_bytes)

    def _patiently(self) -> None:
        failures, pause_s = 0, self.patience.first_pause_s
        if self.pin.hashed and self.hashes.size_bytes == self.pin.size_bytes:
            return  # it was whole already
        if self.pin.size_bytes is not None and self.hashes.size_bytes >= self.pin.size_bytes:
            self._from_the_start()
        while True:
            before = self.hashes.size_bytes
            try:
                self._once()
                return
            except OutOfRange as error:
                if error.total_bytes == before and before:
                    return
                self._from_the_start()
                trouble = TransientFailure("the server has no more of it")
            except TransientFailure as error:
                trouble = error
            if self.hashes.size_bytes - before >= WORTH_BYTES:
                failures, pause_s = 0, self.patience.first_pause_s
            failures += 1
            self._give_up_if(failures, trouble)
            wait_s = max(pause_s, trouble.wait_s or 0.0)
            self.say(f"{self.target.name}: {trouble}; again in {wait_s:.0f} s")
            self._sleep(wait_s)
            pause_s = min(2 * pause_s, self.patience.longest_pause_s)

    def _give_up_if(self, failures: int, trouble: TransientFailure) -> None:
        if trouble.no_way and not self._answered:
            if failures >= self.patience.no_way_tries:
                raise self.web.no_network(str(trouble))
            return
        wait_s = trouble.wait_s or 0.0
        if failures < self.patience.tries and wait_s <= self.patience.longest_wait_s:
            return
        asks = f" and asks to wait {wait_s:.0f} s" if wait_s else ""
        raise AutorlError(
            f"{self.target.name} could not be downloaded: {trouble}{asks} ({failures} tries)",
            where=self.address.shown,
            fault=Fault.CLUSTER,
            next_step="run the same command again, later if need be: it goes on where it stopped",
            exit_code=Exit.ENVIRONMENT,
        )

    def _once(self) -> None:
        """One request, to the end of the file.

        Raises:
            Passing, OutOfRange, AutorlError: see `Web`.
        """
        have = self.hashes.size_bytes
        with self.web.open(self._range(have)) as response:
            self._answered = True
            length = response.headers.get("Content-Length", "")
            length_bytes = int(length) if length.isascii() and length.isdigit() else None
            if response.status == 206 and have:
                span = response.headers.get("Content-Range", "")
                if range_start(span) != have:
                    self._from_the_start()
                    raise TransientFailure("the server goes on at another place than it was asked for")
                self._joined = True
                total = range_total(span) or (None if length_bytes is None else have + length_bytes)
            else:
                if have:
                    self.say(f"{self.target.name}: the server gives it whole or not at all; from the start")
                    self._from_the_start()
                total = length_bytes
            self._expect(total)
            etag = response.headers.get("ETag", "")
            if not self.hashes.size_bytes:
                atomic.write_json(self.notes, {"url": self.address.url.partition("?")[0], "etag": etag})
            for data in chunks(response):
                self._add(data)
        if self.total is not None and self.hashes.size_bytes < self.total:
            raise TransientFailure(f"the connection broke off at {self.hashes.size_bytes} of {self.total} bytes")

    def _range(self, have: int) -> dict[str, str]:
        """The headers that ask for the rest alone; without a hash to check the whole by, only under the server's own tag."""
        if not have:
            return {}
        notes: Any = reading.read_json_or_none(self.notes)
        known = isinstance(notes, dict) and notes.get("url") == self.address.url.partition("?")[0]
        etag = str(notes.get("etag") or "") if known else ""
        if etag.startswith('"') and etag.endswith('"') and etag.isprintable():  # a weak tag promises no equal bytes
            return {"Range": f"bytes={have}-", "If-Range": etag}
        return {"Range": f"bytes={have}-"} if self.pin.hashed else {}

    def _expect(self, total: int | None) -> None:
        """The size that the server announces, against what is known and what the disk has room for."""
        if self.pin.size_bytes is not None and total is not None and total != self.pin.size_bytes:
            self.discard()
            raise AutorlError(
                f"the server has {total} bytes of {self.target.name}, expected are {self.pin.size_bytes}",
                where=self.address.shown,
                next_step="look for it at its source under the pinned revision; a proxy or mirror on the way may alter files",
                exit_code=Exit.FAILED,
            )
        self.total = total if self.pin.size_bytes is None else self.pin.size_bytes
        if self.total is not None:
            check_space(self.part.parent, self.total - self.hashes.size_bytes, self.target.name)

    def _add(self, data: bytes) -> None:
        if self.total is not None and self.hashes.size_bytes + len(data) > self.total:
            self._from_the_start()
            raise TransientFailure(f"the server sends more than the {self.total} bytes of the file")
        view = memoryview(data)
        place = self.hashes.size_bytes
        while view:
            written = os.pwrite(self.fd, view, place)
            self.hashes.update(view[:written])
            place, view = place + written, view[written:]
        self.shown(self.hashes.size_bytes, self.total)

    def _from_the_start(self) -> None:
        os.ftruncate(self.fd, 0)
        self.hashes = Hashes(self.pin)

    def discard(self) -> None:
        atomic.unlink_quietly(self.part)
        atomic.unlink_quietly(self.notes)


# Base models from the Hugging Face Hub at one revision: safetensors, config and tokenizer; never code, never pickles.
#
# The Hub is asked once which files the revision has, how large they are and what their hashes are:
# `/api/models/ORG/NAME/revision/REVISION?blobs=true` gives `sha` (the commit) and `siblings` with `rfilename`, `size`,
# `blobId` (the file's name in git) and, for large files, `lfs.sha256`.

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
    address = HttpSource(f"{hub_url()}/api/models/{name}/revision/{quote(asked, safe='')}?blobs=true", hub=True)
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
