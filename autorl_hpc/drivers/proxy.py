"""Which HTTP proxy leads to a driver: the one that its spec names, else that of the job's environment."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.states import Fault


def proxy_to(url: str, given: str | None, environ: Mapping[str, str]) -> str | None:
    """The proxy's URL; None: straight.

    Args:
        url: of the driver.
        given: `drivers.<name>.proxy`; it stands above the environment, NO_PROXY too.
        environ: HTTPS_PROXY or HTTP_PROXY by the URL's scheme, ALL_PROXY, NO_PROXY; small letters first, as curl and Python do.

    Raises:
        AutorlError: it is no HTTP proxy (SOCKS).
    """
    if given is not None:
        return given
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    if _passed_by(host, parts.port, _variable(environ, "no_proxy")):
        return None
    found = _variable(environ, f"{parts.scheme}_proxy") or _variable(environ, "all_proxy")
    if not found:
        return None
    proxy = found if "://" in found else f"http://{found}"
    kind = proxy.partition("://")[0].lower()
    if kind not in ("http", "https"):
        raise AutorlError(
            f"the way to the driver {host} leads by a proxy of kind `{kind}`; the gateway speaks to HTTP proxies alone",
            where=f"{parts.scheme}_proxy or all_proxy of the job's environment",
            fault=Fault.CLUSTER,
            next_step="name an HTTP proxy in the driver's `proxy`, or in HTTPS_PROXY in the profile's `setup`; or name the driver's host in NO_PROXY",
            exit_code=Exit.ENVIRONMENT,
        )
    return proxy


def _variable(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name) or environ.get(name.upper()) or ""


def _passed_by(host: str, port: int | None, rule: str) -> bool:
    """Whether NO_PROXY names the host: `*`, a name with all below it, an address, or a network."""
    for entry in (part.strip().lower() for part in rule.split(",")):
        if entry == "*":
            return True
        name, _, wanted = entry.rpartition(":") if entry.count(":") == 1 else (entry, "", "")
        if wanted and wanted != str(port):
            continue
        name = name.lstrip(".")
        if name and (host == name or host.endswith(f".{name}") or _within(host, name)):
            return True
    return False


def _within(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False
