"""The driver's side: its address and key, and the one request to it. It may be gone and come back at another address."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.driver_keys import read_key
from autorl_hpc.files.endpoints import read_endpoint
from autorl_hpc.gateway.refusals import Refusal
from autorl_hpc.gateway.settings import Upstream

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("autorl_hpc.gateway")

KeyedHeaders = Callable[["str | None"], "dict[str, str]"]
"""Of a key, the headers that hold it."""

CONNECT_S: Final = 30.0
PATIENCE_S: Final = 300.0
"""How long a request waits for a driver that serves on the cluster and is being started again; never longer than `timeout_s`."""

LOOK_AGAIN_S: Final = 1.0
KEEPALIVE_S: Final = 4.0
"""Servers of open weights close idle connections after 5 s; a request into a closing one is lost."""

COME_AGAIN_S: Final = 10


class DriverLost(Refusal):
    """The driver can't be reached, or broke off before its answer: told to the client as 502 to 504.

    Args:
        detail: for the log.
    """

    def __init__(self, status: int, code: str, detail: str, *, again: bool = True) -> None:
        message = (
            "the driver can't be reached at the moment"
            if again
            else "the driver can't be reached; this is the cluster's fault"
        )
        if code == "driver_timeout":
            message = "the driver did not answer in time"
        super().__init__(status, code, message, retry_after_s=COME_AGAIN_S if again else None)
        self.detail, self._again = detail, again
        self.was_sent = code in ("driver_timeout", "driver_broke_off")

    @property
    def passing(self) -> bool:
        """Not where nothing but another address or certificate helps."""
        return self._again and super().passing


@dataclass(frozen=True)
class Address:
    """Where the driver is now.

    Attributes:
        url: with `/v1`; the rest of the path is appended.
    """

    url: str
    key: str | None


@dataclass
class Sent:
    """An answer that has begun, and the key that it was asked with."""

    response: aiohttp.ClientResponse
    key: str | None


class Driver:
    """Sends requests. Made inside of a running loop."""

    def __init__(self, upstream: Upstream) -> None:
        import aiohttp

        self._upstream = upstream
        self.on_cluster = upstream.endpoint_file is not None
        self._address: Address | None = None
        self._said: str | None = None
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=60),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=upstream.timeout_s),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        """Ends all connections."""
        await self.session.close()

    async def address(self, *, fresh: bool = False) -> Address | None:
        """The address of now; None: no driver is ready. `fresh`: what is known of it may be old."""
        if self._address is None or fresh:
            self._address = await asyncio.to_thread(self._read)
        return self._address

    def _read(self) -> Address | None:
        upstream = self._upstream
        try:
            key = upstream.key if upstream.key_file is None else read_key(upstream.key_file)
            url = upstream.url if upstream.endpoint_file is None else endpoint_url(upstream.endpoint_file)
        except (AutorlError, OSError) as error:
            if (said := str(error)) != self._said:
                self._said = said
                log.error("%s", said)
            return None
        return None if url is None else Address(url.rstrip("/"), key)

    async def send(
        self, path: str, headers: dict[str, str], keyed: KeyedHeaders, body: bytes, tries: list[str]
    ) -> Sent:
        """The answer's beginning.

        Args:
            path: appended to the driver's address.
            keyed: makes the headers that hold the key.
            tries: what went wrong at each try is appended; read for the log.

        Raises:
            DriverLost: nothing came.
        """
        import aiohttp

        began, broken_off = time.monotonic(), 0
        patience_s = min(self._upstream.timeout_s, PATIENCE_S)
        fresh = False
        while True:
            address = await self.address(fresh=fresh)
            if address is not None:
                try:
                    response = await self._once(address, path, {**headers, **keyed(address.key)}, body)
                    return Sent(response, address.key)
                except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError, ssl.SSLError) as error:
                    tries.append(type(error).__name__)
                    raise DriverLost(
                        502,
                        "driver_certificate",
                        f"its certificate is not trusted ({type(error).__name__})",
                        again=False,
                    ) from None
                except aiohttp.ServerTimeoutError as error:
                    tries.append(type(error).__name__)
                    if not isinstance(error, aiohttp.ConnectionTimeoutError):
                        raise DriverLost(
                            504, "driver_timeout", f"nothing came within {self._upstream.timeout_s:g} s"
                        ) from None
                except aiohttp.ClientConnectorError as error:
                    tries.append(type(error.os_error).__name__)
                except (
                    aiohttp.ClientError,
                    OSError,
                ) as error:  # sent, and no answer: once more, it may have been an idle connection
                    tries.append(type(error).__name__)
                    broken_off += 1
                    if broken_off > 1:
                        raise DriverLost(502, "driver_broke_off", "the connection broke before an answer") from None
            else:
                tries.append("not ready")
            fresh = True
            waited_s = time.monotonic() - began
            if self.on_cluster:
                if waited_s > patience_s:
                    raise DriverLost(503, "driver_away", f"no driver for {waited_s:.0f} s ({tries[-1]})")
                await asyncio.sleep(min(LOOK_AGAIN_S, patience_s / 5))
            else:
                if len(tries) > self._upstream.retries:
                    raise DriverLost(502, "driver_unreachable", f"it can't be reached ({tries[-1]})")
                await asyncio.sleep(min(5.0, 0.25 * 2 ** len(tries)))

    async def _once(self, address: Address, path: str, headers: dict[str, str], body: bytes) -> aiohttp.ClientResponse:
        from yarl import URL

        url = address.url + path
        proxy = None if self._upstream.proxy is None or is_here(url) else self._upstream.proxy
        return await self.session.post(
            URL(url, encoded=True), data=body, headers=headers, allow_redirects=False, proxy=proxy
        )


def is_here(url: str) -> bool:
    """Whether an address is on this machine: no proxy leads there."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def endpoint_url(path: Path) -> str | None:
    """Where the driver serves by its endpoint file; None: it is not ready."""
    endpoint = read_endpoint(path)
    return endpoint.url if endpoint is not None and endpoint.ready else None
