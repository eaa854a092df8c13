"""One HTTP request, and what its failing means: try again, no network, or never."""

from __future__ import annotations

import email.utils
import errno
import http.client
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.stage.sources import Address, hub_token
from autorl_hpc.states import Fault

CHUNK_BYTES = 1024 * 1024
PASSING_CODES = frozenset({408, 425, 429, 500, 502, 503, 504})
NO_WAY_ERRNOS = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ECONNREFUSED})
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Passing(Exception):
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

    def __init__(self, address: Address, timeout_s: float) -> None:
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
            raise Passing(_words(error)) from None
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
            return Passing(f"the server answers {code}", wait_s=retry_after_s(headers.get("Retry-After")))
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
            return Passing(f"the proxy answers: {error}", no_way=True)
        no_way = isinstance(error, (socket.gaierror, TimeoutError)) or error.errno in NO_WAY_ERRNOS
        return Passing(_words(error), no_way=no_way)

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
            data = response.read1(CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise Passing(_words(error)) from None
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
