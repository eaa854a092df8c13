"""Wait for a run's driver before the agent's clock starts, and find the HTTP proxy to a driver."""

from __future__ import annotations

import ipaddress
import logging
import time
import urllib.request
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.store import STALE_AFTER_S, EndpointWatch
from autorl_hpc.records.driver import DriverEndpoint, DriverSpec
from autorl_hpc.states import Fault

log = logging.getLogger("autorl_hpc.drivers")

LOOK_S = 1.0
AFTER_FAILURE_S = 300.0
"""After a driver's job gave up, the next job of its chain may still come; this is how long to wait for it."""


def wait_ready(
    experiment: ExperimentDir,
    name: str,
    spec: DriverSpec,
    stop: Callable[[], bool] = lambda: False,
    *,
    look_s: float = LOOK_S,
    after_failure_s: float = AFTER_FAILURE_S,
) -> DriverEndpoint | None:
    """Return the endpoint of a driver of kind `vllm` once it answers; None if `stop` becomes true first. Raises AutorlError if it
    does not come up within its `patience_s`, or its job gave up; the cluster's fault."""
    watch = EndpointWatch(experiment.driver_endpoint(name), STALE_AFTER_S)
    log.info("waiting for the driver %s; the agent's clock has not started", name)
    started = failed_at = time.monotonic()
    failed: tuple[int, int] | None = None
    while not stop():
        if (ready := watch.ready()) is not None:
            return ready
        now, last = time.monotonic(), watch.last
        failure = (last.generation, last.counter) if last is not None and last.state == "failed" else None
        if failure != failed:
            failed, failed_at = failure, now
        if failed is not None and now - failed_at > min(after_failure_s, spec.patience_s):
            raise _not_there(name, "its job gave up", last, experiment)
        if now - started > spec.patience_s:
            raise _not_there(name, f"it did not come up within {spec.patience_s:.0f} s", last, experiment)
        time.sleep(look_s)
    return None


def _not_there(name: str, why: str, last: DriverEndpoint | None, experiment: ExperimentDir) -> AutorlError:
    told = f" ({last.problem})" if last is not None and last.problem else ""
    what, where = f"the driver {name} doesn't answer: {why}{told}", experiment.driver_log(name)
    advice = f"see the log of its server, then launch again: `autorl-hpc launch {experiment.given}`"
    return AutorlError(what, where=where, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)


# --- HTTP proxy to a driver: its spec's, else that of the job's environment


def proxy_to(url: str, given: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the URL of the proxy to a driver; None for a direct connection. Raises AutorlError if it is not an HTTP proxy (SOCKS).

    Args:
        given: `drivers.<name>.proxy`; it takes precedence over the environment, also over NO_PROXY.
        environ: HTTPS_PROXY or HTTP_PROXY by the URL's scheme, ALL_PROXY, NO_PROXY; lower case first, as in curl and Python.
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
        what = (
            f"the way to the driver {host} leads by a proxy of kind `{kind}`; the gateway speaks to HTTP proxies alone"
        )
        where = f"{parts.scheme}_proxy or all_proxy of the job's environment"
        advice = "name an HTTP proxy in the driver's `proxy`, or in HTTPS_PROXY in the profile's `setup`; or name the driver's host in NO_PROXY"
        raise AutorlError(what, where=where, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)
    return proxy


def _variable(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name) or environ.get(name.upper()) or ""


def _passed_by(host: str, port: int | None, rule: str) -> bool:
    """Return whether NO_PROXY names the host: `*`, a name with its subdomains, an address, or a network."""
    entries = [entry.strip().lower() for entry in rule.split(",")]
    place = host if port is None else f"{host}:{port}"
    named = urllib.request.proxy_bypass_environment(place, {"no": rule})  # type: ignore[attr-defined]  # typeshed lacks it
    return "*" in entries or bool(named) or any(_within(host, entry) for entry in entries)


def _within(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False
