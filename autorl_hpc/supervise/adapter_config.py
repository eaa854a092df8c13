"""adapter_config.json of a LoRA adapter: by what its factors are multiplied. Whatever asks for more than that is refused.

The fields are those of peft's LoraConfig (0.18 to 0.21). Nothing in them is followed: `base_model_name_or_path`, `revision`
and `auto_mapping` are never looked at. A field that this module doesn't know must be empty: what it would change is unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autorl_hpc.errors import Refused

ADAPTER_CONFIG = "adapter_config.json"

MERGE_YOURSELF = "merge it yourself: `model.merge_and_unload().save_pretrained(DIR)`, and submit that folder"

MAX_RANK = 1024
"""Beyond it an adapter is no smaller than full weights, and merging costs more than training did."""

MAX_ALPHA = 1e9
"""So that every scale is a finite fp32."""

HARMLESS_STARTS = ("gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights`, beside true and false, that leave the base's weights as they are. pissa, olora, corda,
loftq and lora_ga change them, and the adapter's factors are meant for the changed ones."""

NOT_READ = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    ]
)
"""Fields that change nothing in what is added to the base: which layers have factors, the tensors themselves say."""

READ = frozenset(
    [
        "alpha_pattern",
        "bias",
        "init_lora_weights",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    ]
)

PLAIN_PATTERN = re.compile(r"\^?[A-Za-z0-9_.-]{1,200}")
"""Names of modules, as peft writes them into `rank_pattern` and `alpha_pattern`. Other regular expressions are not run: one of
an agent's could take for ever."""


@dataclass(frozen=True)
class _Pattern:
    """One key of rank_pattern or alpha_pattern: matches as peft's `get_pattern_key` does."""

    last: str  # what a matching name must end with: spares the regular expression most names
    regex: re.Pattern[str]
    value: float

    @classmethod
    def of(cls, key: str, value: float) -> _Pattern:
        last = key.removeprefix("^").rpartition(".")[2]
        return cls(last, re.compile(rf"(.*\.)?({key})$"), value)

    def matches(self, module: str) -> bool:
        return module.endswith(self.last) and self.regex.match(module) is not None


@dataclass(frozen=True)
class LoraSettings:
    """What is left of a config that only adds scale * B @ A to some weights."""

    rank: int
    alpha: float
    rslora: bool
    ranks: tuple[_Pattern, ...]
    alphas: tuple[_Pattern, ...]
    targets: frozenset[str] | None

    def rank_of(self, module: str) -> int:
        """The rank that the config gives to a module."""
        return int(_first(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What B @ A of a module is multiplied by: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732)."""
        rank = self.rank_of(module)
        return _first(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def targets_module(self, module: str) -> bool:
        """Whether peft would give this module an adapter; a `target_modules` that is a pattern is not run."""
        if self.targets is None:
            return True
        parts = module.split(".")
        return any(".".join(parts[start:]) in self.targets for start in range(len(parts)))


def read_settings(config: Mapping[str, Any], max_patterns: int) -> LoraSettings:
    """The settings of a plain LoRA adapter.

    Args:
        max_patterns: of `rank_pattern` and `alpha_pattern` each; more than the base has tensors say nothing new.

    Raises:
        Refused: a field is no such thing (`adapter_config`), or asks for more than plain LoRA (`adapter_unsupported`).
    """
    if config.get("peft_type") != "LORA":
        raise _unsupported("peft_type", config.get("peft_type"), "only LORA is merged")
    _refuse_more(config)
    bias = config.get("bias", "none")
    if bias != "none":
        raise _unsupported("bias", bias, "only `none` is merged")
    start = config.get("init_lora_weights", True)
    if start is not None and not isinstance(start, bool) and start not in HARMLESS_STARTS:
        raise _unsupported("init_lora_weights", start, "it changes the base model's own weights, or may")
    rslora = config.get("use_rslora", False)
    if not isinstance(rslora, bool):
        raise _wrong("use_rslora", rslora, "true or false")
    return LoraSettings(
        rank=_rank("r", config.get("r", 8)),  # peft's defaults
        alpha=_alpha("lora_alpha", config.get("lora_alpha", 8)),
        rslora=rslora,
        ranks=_patterns(config, "rank_pattern", max_patterns),
        alphas=_patterns(config, "alpha_pattern", max_patterns),
        targets=_targets(config.get("target_modules")),
    )


def _refuse_more(config: Mapping[str, Any]) -> None:
    """DoRA, biases, further modules, tokens, replicated layers, variants, and what later versions of peft may add."""
    for field in sorted(set(config) - READ - NOT_READ):
        value = config[field]
        if value is not None and value is not False and value not in ("", [], {}):
            raise _unsupported(field, value, "it must be left out, null or false")


def _rank(field: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise _wrong(field, value, f"a whole number from 1 to {MAX_RANK}")
    return value


def _alpha(field: str, value: Any) -> float:
    if (
        isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MAX_ALPHA
    ):  # NaN isn't either
        raise _wrong(field, value, f"a number of at most {MAX_ALPHA:.0e}")
    return float(value)


def _patterns(config: Mapping[str, Any], field: str, most: int) -> tuple[_Pattern, ...]:
    table = config.get(field)
    if table is None:
        return ()
    if not isinstance(table, dict) or len(table) > most:
        raise _wrong(field, table, f"a table of at most {most} modules")
    read = _rank if field == "rank_pattern" else _alpha
    for key in table:
        if not PLAIN_PATTERN.fullmatch(key):
            raise _unsupported(field, key, "its keys must be names of modules, such as layers.0.mlp.up_proj")
    return tuple(_Pattern.of(key, read(f"{field}.{key[:100]}", value)) for key, value in table.items())


def _first(patterns: tuple[_Pattern, ...], module: str, default: float) -> float:
    return next((pattern.value for pattern in patterns if pattern.matches(module)), default)


def _targets(value: Any) -> frozenset[str] | None:
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _wrong("target_modules", value, "a list of names")
    return frozenset(value)


def _unsupported(field: str, value: Any, why: str) -> Refused:
    what = f"{ADAPTER_CONFIG}: field {field[:100]} is {repr(value)[:100]}; {why}"
    return Refused("adapter_unsupported", what, MERGE_YOURSELF)


def _wrong(field: str, value: Any, needed: str) -> Refused:
    what = f"{ADAPTER_CONFIG}: field {field[:150]} is {_short(value)}; needed is {needed}"
    return Refused("adapter_config", what, f"save the adapter again with peft, or {MERGE_YOURSELF}")


def _short(value: Any) -> str:
    """A hostile number may be too long to be printed at all."""
    return "a huge number" if isinstance(value, int) and value.bit_length() > 300 else repr(value)[:100]
