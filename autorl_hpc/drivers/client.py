"""Wait for a run's driver before the agent's clock starts, prove its key, say whether it was lost, find the HTTP proxy to it."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import atomic
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.processes import host_name
from autorl_hpc.files.safe_open import DriverCall
from autorl_hpc.files.store import STALE_AFTER_S, EndpointWatch, key_path, read_endpoint, read_key, write_endpoint
from autorl_hpc.gateway.token_usage import UsageMeter
from autorl_hpc.gateway.upstream import REFUSES, cluster_trouble, is_here
from autorl_hpc.records.driver import DriverEndpoint, DriverSpec
from autorl_hpc.states import Fault

log = logging.getLogger("autorl_hpc.drivers")

LOOK_S = 1.0
AFTER_FAILURE_S = 300.0
"""After a driver's job gave up, the next job of its chain may still come; this is how long to wait for it."""


def wait_ready(
    experiment: ExperimentDir, name: str, spec: DriverSpec, stop: Callable[[], bool] = lambda: False
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
        if failed is not None and now - failed_at > min(AFTER_FAILURE_S, spec.patience_s):
            raise _not_there(name, "its job gave up", last, experiment)
        if now - started > spec.patience_s:
            raise _not_there(name, f"it did not come up within {spec.patience_s:.0f} s", last, experiment)
        time.sleep(LOOK_S)
    return None


def _not_there(name: str, why: str, last: DriverEndpoint | None, experiment: ExperimentDir) -> AutorlError:
    told = f" ({last.problem})" if last is not None and last.problem else ""
    what, where = f"the driver {name} doesn't answer: {why}{told}", experiment.driver_log(name)
    advice = f"see the log of its server, then launch again: `autorl-hpc launch {experiment.given}`"
    return AutorlError(
        what, where=where, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT, passes=True
    )


# --- the key of a driver behind an API, proven before a clock starts: one request for one token, by the first run of the experiment.
# drivers/<name>.json then says `ready` to the others. A key that is refused is waited for: a launch with the right one goes on.

QUESTION = "Answer with one word."
OF_THE_ACCOUNT = ("api key", "credit balance", "billing")
ASK_LIMIT_S = 60.0
KEY_PATIENCE_S = 600.0
OTHERS_S = 60.0  # after which a run asks itself, as the one that asked first gives no word
PASSING_PAUSE_S = 5.0


def wait_key(
    experiment: ExperimentDir,
    name: str,
    spec: DriverSpec,
    dialect: str,
    stop: Callable[[], bool] = lambda: False,
    patience_s: float = KEY_PATIENCE_S,
) -> bool:
    """Return True once a driver of kind `api` has answered with its key, or has none; False if `stop` becomes true first. Raises
    AutorlError if it doesn't in `patience_s`; the cluster's fault. `dialect`: what the agent speaks."""
    path, place = key_path(experiment, name, spec), experiment.driver_endpoint(name)
    began, problem = time.monotonic(), None
    asked: str | None = None  # the key that this run, or the one that asked first, tried last
    mine = path is not None and atomic.publish_bytes(_first(experiment, name), b"")
    while path is not None and not stop():
        known = read_endpoint(place)
        if known is not None and known.ready:
            return True
        key, pause_s = read_key(path), LOOK_S
        if asked is None and not mine and known is not None:
            asked, problem = key, known.problem
        if key != asked and (mine or asked is not None or time.monotonic() - began > OTHERS_S):
            asked = key
            problem, passes, told = _ask_one_token(spec, dialect, key, spec.url or "")
            counter = 1 + (0 if known is None else known.counter)
            facts: dict[str, Any] = {"url": spec.url, "model": spec.model, "host": host_name(), "pid": os.getpid()}
            facts |= {"said": told, "problem": problem, "state": "ready" if problem is None else "failed"}
            write_endpoint(place, DriverEndpoint(name=name, generation=1, counter=counter, **facts))
            if problem is None:
                return True
            log.error("the driver %s %s; the agent's clock has not started", name, problem)
            if passes:
                asked, mine, pause_s = None, True, PASSING_PAUSE_S
        if time.monotonic() - began > patience_s:
            forget_key(experiment, name)  # the next attempt, or a launch with another key, asks again
            what = f"the driver {name} {problem or 'was not asked'}"
            advice, code = f"correct it, then launch again: `autorl-hpc launch {experiment.given}`", Exit.ENVIRONMENT
            raise AutorlError(what, where=path, fault=Fault.CLUSTER, next_step=advice, exit_code=code, passes=True)
        time.sleep(pause_s)
    return path is None


def forget_key(experiment: ExperimentDir, name: str) -> None:
    """Have the key of a driver of kind `api` proven again by the next attempt."""
    for path in (experiment.driver_endpoint(name), _first(experiment, name)):
        path.unlink(missing_ok=True)


def _first(experiment: ExperimentDir, name: str) -> Path:
    return experiment.drivers / f"{name}.asked"


def answers_us(experiment: ExperimentDir, name: str, spec: DriverSpec, dialect: str) -> bool:
    """Return whether a driver answers a question of our own now: an agent's requests may fail by the agent's doing."""
    url, path = spec.url, key_path(experiment, name, spec)
    if spec.kind == "vllm":
        endpoint, dialect = read_endpoint(experiment.driver_endpoint(name)), "openai-chat"
        url = endpoint.url if endpoint is not None and endpoint.ready else None
    try:
        return url is not None and _ask_one_token(spec, dialect, "" if path is None else read_key(path), url)[0] is None
    except AutorlError:
        return False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None


def _ask_one_token(spec: DriverSpec, dialect: str, key: str, url: str) -> tuple[str | None, bool, str]:
    """Ask the driver at `url` for one token. Return what is wrong, None if nothing; whether that may pass; what the request took."""
    bearer = {"Authorization": f"Bearer {key}"}
    talk = {"model": spec.model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1}
    parts = {"contents": [{"role": "user", "parts": [{"text": QUESTION}]}], "generationConfig": {"maxOutputTokens": 1}}
    path, body, headers = {
        "openai-responses": (
            "/responses", {"model": spec.model, "input": QUESTION, "max_output_tokens": 1}, bearer,
        ),
        "anthropic": ("/messages", talk, {"x-api-key": key, "anthropic-version": "2023-06-01"}),
        "gemini": (f"/models/{spec.model}:generateContent", parts, {"x-goog-api-key": key}),
    }.get(dialect, ("/chat/completions", talk, bearer))  # fmt: skip
    proxy = None if is_here(url) else proxy_to(url, spec.proxy, os.environ)
    ways = urllib.request.ProxyHandler({} if proxy is None else {"http": proxy, "https": proxy})
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {**headers, "Content-Type": "application/json"}
    )
    limit_s = min(spec.timeout_s, ASK_LIMIT_S)
    hidden = key or "\0"  # a driver may have none
    try:
        with urllib.request.build_opener(ways, _NoRedirect()).open(request, timeout=limit_s) as answer:
            meter = UsageMeter(answer.headers.get("Content-Type", ""))
            meter.feed(answer.read())
            usage = meter.end(True)
        if (failure := meter.failure) is None:
            return None, False, f"one request to prove the key: {usage.tokens_in} tokens in, {usage.tokens_out} out"
        problem, passes = cluster_trouble(failure[0], failure[1].replace(hidden, "***"), known=True)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(4096).decode(errors="replace").replace(hidden, "***")
        # an agent of no dialect may ask at another address
        problem, passes = cluster_trouble(error.code, said, known=dialect != "any")
        if error.code == 400 and any(words in said.lower() for words in OF_THE_ACCOUNT):  # no agent wrote the question
            problem = f"gives this account no answers (400: {said[:300]})"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        passes = not isinstance(reason, ssl.SSLCertVerificationError)
        problem = f"can't be reached: {reason}".replace(hidden, "***")
    return problem, passes, "one request to prove the key, not answered"


LOST = ("driver_key", "driver_certificate", "driver_redirects", "driver_unreachable", "driver_away", REFUSES)
"""Words of the gateway for what does not pass."""

MANY = 3  # failures in a row of other kinds
SILENT_S = 60.0  # at least, where the agent exits: it may do so with its first request under way


def lost(
    calls: Iterable[DriverCall],
    attempt: int,
    elapsed_s: float,
    *,
    exited: bool,
    answers: Callable[[], bool] | None = None,
    again: bool = False,
) -> str | None:
    """Return how a driver was lost, None if it was not: the attempt's last requests failed by the cluster's fault (and it still doesn't
    answer a question of our own, `answers`, since an agent may bring about any status; not asked where the agent works `again`), or
    were refused with 400, which may hold in words that the account is empty, and so is that question; or requests were without an
    answer for more than half of the run's time; where the agent `exited`, since the last answer to this attempt. `elapsed_s`: used of
    the run's time, until when requests without an end are under way."""
    row: list[str] = []
    refused = 0
    silent_s = heard_s = 0.0
    for call in calls:
        own = call.attempt == attempt
        if call.refused is not None or (not own and (exited or call.under_way)):
            continue
        ended_s = elapsed_s if call.under_way else call.elapsed_s
        if call.under_way or not call.status or call.fault == "cluster":
            silent_s += max(0.0, ended_s - max(heard_s, call.elapsed_s - call.total_s))
        elif exited:
            silent_s = 0.0
        heard_s = max(heard_s, ended_s)
        if not own or call.under_way or call.left:
            continue
        if call.fault == "cluster":
            row.append(call.error or str(call.status))
        elif call.status < 300:
            row.clear()
            refused = 0
        else:
            refused += call.status == 400
    if len(row) >= MANY or any(error.startswith(LOST) for error in row):
        if again or answers is None or not answers():
            told = f"the last {len(row)} requests failed by the cluster's fault, the last one: {row[-1]}"
            return f"the driver was lost: {told}"
    elif refused >= MANY and answers is not None and not answers():
        return (
            f"the driver was lost: the last {refused} requests were refused with 400, and so is a question of our own"
        )
    if silent_s > max(SILENT_S if exited else 0.0, elapsed_s / 2):
        return f"the driver was lost: requests were without an answer for {silent_s:.0f} of {elapsed_s:.0f} s"
    return None


# --- HTTP proxy to a driver: its spec's, else that of the job's environment


def proxy_to(url: str, given: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the URL of the proxy to a driver; None for a direct connection. Raises AutorlError if it is not an HTTP proxy (SOCKS). `given`,
    the spec's own, takes precedence over the environment, also over NO_PROXY; else HTTPS_PROXY or HTTP_PROXY, ALL_PROXY and NO_PROXY count,
    lower case first, as in curl and Python."""
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
        what = f"the way to the driver {host} leads by a proxy of kind `{kind}`; the gateway knows HTTP proxies alone"
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
    if "*" in entries or named:
        return True
    for entry in entries:
        with contextlib.suppress(ValueError):  # one of the two is a name
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
    return False
