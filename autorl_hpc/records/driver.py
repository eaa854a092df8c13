"""Records of drivers, the LLMs that agents call: settings, the part that distinguishes runs, the address of a served one."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, StringConstraints, field_validator, model_validator

from autorl_hpc.records.base import Duration, KeyFile, Name, Record, Resources, Revision, Sha256, Strict, Visible

NO_DRIVER = "none"  # in a matrix: the agent calls no LLM
TOKENS_PRICED = 1_000_000  # number of tokens that prices refer to
_ANSWERS = """dtype quantization kv-cache-dtype generation-config seed enable-auto-tool-choice tool-call-parser reasoning-parser
chat-template override-generation-config default-chat-template-kwargs rope-scaling rope-theta tokenizer-mode config-format
limit-mm-per-prompt"""
_SPEED = """gpu-memory-utilization max-num-seqs max-num-batched-tokens block-size enable-prefix-caching no-enable-prefix-caching
enforce-eager enable-chunked-prefill no-enable-chunked-prefill async-scheduling pipeline-parallel-size data-parallel-size
enable-expert-parallel disable-custom-all-reduce swap-space cpu-offload-gb kv-cache-memory-bytes attention-backend
compilation-config distributed-executor-backend uvicorn-log-level disable-log-stats"""
SERVE_OPTIONS = {**dict.fromkeys(_ANSWERS.split(), True), **dict.fromkeys(_SPEED.split(), False)}
"""Allowed options of `vllm serve` in `args`, and whether they change the answers. Others load code, read an options file or open
the server to others; argparse accepts abbreviations too."""

OPTION_VALUES: dict[str, tuple[str, ...]] = {"distributed-executor-backend": ("mp", "uni")}
"""Allowed values: vLLM imports any other word as a class, and `ray` joins any cluster that answers."""

OWN_OPTIONS = {
    **{"model": "model", "served-model-name": "model", "tensor-parallel-size": "tensor_parallel"},
    **{"max-model-len": "context_tokens", "api-key": None, "host": None, "port": None},
}
"""Options that the suite sets, with the field to use instead."""

OF_A_REQUEST = frozenset(("model", "messages", "input", "contents", "prompt", "stream"))
"""Fields of an agent's request, which `parameters` must not set."""

REQUEST_PATH = re.compile(r"/(chat/completions|completions|responses|messages|models(/.*)?|embeddings)/*$")
"""How the addresses of requests end; `url` stops before this."""

Argument = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=2000)]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]


def checked_url(value: str) -> str:
    """`value` without a slash at its end. Raises ValueError: no http or https address, or one with more than host and path."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or not re.fullmatch(r"[!-~]+", value):
        raise ValueError("an http or https address")
    if parts.username is not None or parts.password is not None:
        raise ValueError("no user and password in an address: use `key_file`")
    if parts.query or parts.fragment:
        raise ValueError("an address without `?` and `#`")
    _ = parts.port  # raises its own ValueError for a bad port
    return value.rstrip("/")


HttpUrl = Annotated[str, StringConstraints(max_length=500), AfterValidator(checked_url)]


class DriverSpec(Resources):
    """An LLM that agents call: behind an API (`api`), or an open-weights model that a job of ours serves (`vllm`).

    `gpus`, `cpus`, `memory` and `time` are the driver job's; left out: what the cluster's profile says of `driver`.
    """

    kind: Literal["api", "vllm"]
    url: HttpUrl | None = Field(None, description="Of `api`: with `/v1`, such as `https://api.example.org/v1`.")
    model: Visible = Field(description="Of `api`: as the endpoint calls it. Of `vllm`: a staged model.")
    revision: Revision | None = Field(None, description="Which weights answer, in any words. Makes runs of their own.")
    key_file: KeyFile | None = Field(None, description="Of `api`: the key alone, readable by its owner alone.")
    key_variable: VariableName | None = Field(None, description="Of `api`: the launching shell's variable with it.")
    context_tokens: int | None = Field(None, ge=256, description="The window, answer included, and the server's.")
    max_output_tokens: int | None = Field(None, ge=1, description="Of one answer; agents are told.")
    price_in: float | None = Field(None, ge=0, description="US dollars for a million tokens of requests.")
    price_out: float | None = Field(None, ge=0, description="US dollars for a million tokens of answers.")
    price_cached: float | None = Field(None, ge=0, description="The same of cached tokens; default: `price_in`.")
    parameters: dict[Name, JsonValue] = Field(default_factory=dict, description="Further fields of requests.")
    tools: tuple[Visible, ...] = Field((), description="Hosted tools, as `web_search`, that are not refused.")
    proxy: HttpUrl | None = Field(None, description="A proxy to the API; default: HTTPS_PROXY and the like of the job.")
    timeout_s: Duration = Field(600.0, description="Of one request, without any byte of an answer.")
    retries: int = Field(4, ge=0, le=20, description="Of a request that was not answered, beside the first try.")
    bodies: bool = Field(False, description="Keep requests and answers in the run's record, not their sizes alone.")
    tensor_parallel: int | None = Field(None, ge=1, le=64, description="Of `vllm`; left out: the job's GPUs.")
    args: tuple[Argument, ...] = Field((), description="Of `vllm`: further options of `vllm serve`.")
    time: Duration | None = Field(None, description="Of `vllm`: time limit of one job; the next one goes on.")
    patience_s: Duration = Field(7200.0, description="Of `vllm`: agents wait so long for it before their clock starts.")
    idle_exit_s: Duration = Field(3600.0, description="Of `vllm`: idle for so long with no open run, it ends.")

    @field_validator("url")
    @classmethod
    def _ends_before_requests(cls, value: str | None) -> str | None:
        found = None if value is None else REQUEST_PATH.search(value)
        if found is not None:
            raise ValueError(f"leave `{found[0]}` out: the address goes up to and with `/v1`")
        return value

    @field_validator("parameters")
    @classmethod
    def _leaves_the_rest(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        taken = sorted(OF_A_REQUEST & set(value))
        if taken:
            raise ValueError(f"`{taken[0]}` is set by the agent's request and the other fields")
        return value

    @field_validator("args")
    @classmethod
    def _known_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        serve_options(value)
        return value

    @model_validator(mode="after")
    def _of_its_kind(self) -> DriverSpec:
        api = ("url", "key_file", "key_variable", "proxy", "tools")
        vllm = ("tensor_parallel", "args", "time", "gpus", "cpus", "memory", "patience_s", "idle_exit_s")
        others = vllm if self.kind == "api" else api
        fields = type(self).model_fields  # not only the fields that were set: experiment.json has the defaults too
        given = next((name for name in others if getattr(self, name) != fields[name].default), None)
        if given is not None:
            raise ValueError(f"`{given}` is no field of a driver of kind `{self.kind}`")
        if self.kind == "api" and self.url is None:
            raise ValueError("`url` is missing: the address of the API, such as https://api.example.org/v1")
        if self.key_file is not None and self.key_variable is not None:
            raise ValueError("`key_file` and `key_variable`: one of them")
        if self.max_output_tokens and self.context_tokens and self.max_output_tokens >= self.context_tokens:
            raise ValueError("`max_output_tokens` must be less than `context_tokens`: the question needs room too")
        return self

    @property
    def resources(self) -> Resources:
        return Resources(gpus=self.gpus, cpus=self.cpus, memory=self.memory)

    @property
    def priced(self) -> bool:
        return self.price_in is not None or self.price_out is not None

    @property
    def fully_priced(self) -> bool:
        """Whether both have one: what has none would be counted as free."""
        return self.price_in is not None and self.price_out is not None

    def cost_usd(self, tokens_in: int, tokens_out: int, tokens_cached: int = 0) -> float | None:
        """What tokens cost, None without prices. `tokens_in`: of requests, the cached ones among them."""
        if not self.priced:
            return None
        price_in = self.price_in or 0.0
        cached = price_in if self.price_cached is None else self.price_cached
        total = (tokens_in - tokens_cached) * price_in + tokens_cached * cached + tokens_out * (self.price_out or 0.0)
        return total / TOKENS_PRICED

    def dearest_usd(self, tokens: int) -> float | None:
        """The most that so many tokens can cost, None unless requests and answers have a price."""
        prices = (self.price_in or 0.0, self.price_out or 0.0, self.price_cached or 0.0)
        return max(prices) * tokens / TOKENS_PRICED if self.fully_priced else None

    def science(self, model_hash: str | None) -> DriverScience:
        """What of it makes a run another run. `model_hash`: content hash of the staged model, of `vllm`."""
        same = {name: getattr(self, name) for name in DriverScience.model_fields if name in type(self).model_fields}
        same["tools"] = tuple(sorted(self.tools))
        host = urlsplit(self.url or "").netloc.lower() or None
        options = {name: value for name, value in serve_options(self.args).items() if SERVE_OPTIONS[name]}
        return DriverScience(**same, host=host, model_content_hash=model_hash, options=options)


def serve_options(args: tuple[str, ...]) -> dict[str, str | None]:
    """Options of `vllm serve` with their values, None of a bare flag. Raises ValueError: an option is not allowed, stands twice,
    or a value has none."""
    found: dict[str, str | None] = {}
    last: str | None = None
    for argument in args:
        if argument.startswith("-"):
            written, equals, value = argument.partition("=")
            name = written.removeprefix("--").replace("_", "-")
            if not written.startswith("--") or name not in SERVE_OPTIONS:
                if name in OWN_OPTIONS:
                    field = OWN_OPTIONS[name]
                    raise ValueError(
                        f"`{written}` is set by the suite" + (f": use the field `{field}`" if field else "")
                    )
                known = ", ".join(sorted(SERVE_OPTIONS))
                raise ValueError(f"`{written}` may not be given to `vllm serve` here; allowed are {known}")
            if name in found:
                raise ValueError(f"`{written}` stands twice")
            found[name] = value if equals else None
            last = None if equals else name
        elif last is None:
            raise ValueError(f"{argument!r} belongs to no option: write `--option`, then its value")
        else:
            found[last], last = argument, None
    for name, allowed in OPTION_VALUES.items():
        if name in found and found[name] not in allowed:
            raise ValueError(f"`--{name}` is one of {', '.join(allowed)} here")
    return found


class DriverScience(Strict):
    """What answers an agent's requests: part of what makes a run another run."""

    kind: Literal["api", "vllm"]
    host: str | None = Field(None, description="Of `api`: host and port of its address.")
    model: str
    model_content_hash: Sha256 | None = Field(None, description="Of `vllm`: of the staged model.")
    revision: str | None = None
    parameters: dict[Name, JsonValue] = Field(default_factory=dict)
    context_tokens: int | None = None
    max_output_tokens: int | None = None
    tools: tuple[str, ...] = ()
    options: dict[str, str | None] = Field(default_factory=dict, description="Of `vllm serve`: what changes answers.")


class DriverEndpoint(Record):
    """drivers/<name>.json: where a driver of kind `vllm` answers. Rewritten every few seconds by its job with a higher counter."""

    name: Name
    url: str | None = Field(None, description="Up to and with `/v1`; null: it has no port yet.")
    model: str = Field(description="As requests name it.")
    generation: int = Field(ge=1, description="Of the job: a newer one has a higher, and an older one then steps back.")
    host: str
    pid: int
    job_id: str | None = None
    state: Literal["starting", "ready", "failed", "ended"] = "starting"
    ready: bool = False
    counter: int = Field(0, ge=0, description="Heartbeat, judged by the reader's own clock.")
    starts: int = Field(0, ge=0, description="How often this job started the server.")
    problem: str | None = Field(None, description="Why it doesn't answer, where that is known.")
    said: str | None = Field(None, description="What its server printed last; of one that starts.")

    @model_validator(mode="before")
    @classmethod
    def _says_ready(cls, value: Any) -> Any:
        """`ready` follows from the state for who reads no states."""
        return {**value, "ready": value.get("state") == "ready"} if isinstance(value, dict) else value
