"""Check a submitted LoRA adapter by its headers, and merge it into the staged, pinned base model alone: W + (B @ A) * scale, with peft's
names: `base_model.model.<module>.lora_A.weight` (rank, in), `.lora_B.weight` (out, rank)."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autorl_hpc.errors import Refused
from autorl_hpc.files.checkpoint import HEAD_NAME, INDEX_NAME, ITEM_BYTES, STORED, TensorSpec, narrow, widen
from autorl_hpc.records.entries import MergedAdapter
from autorl_hpc.supervise.lint import (
    ADAPTER_CONFIG,
    BaseModel,
    Linted,
    SubmittedFolder,
    explain_names,
    ignored_names,
    read_exactly,
)
from autorl_hpc.supervise.model_config import compare_config

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float32]

ADAPTER_WEIGHTS, ADAPTER_PICKLE = "adapter_model.safetensors", "adapter_model.bin"
ADAPTER_FILES = frozenset({ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLE})
MERGE_YOURSELF = "merge it yourself: `model.merge_and_unload().save_pretrained(DIR)`, and submit that folder"

# --- adapter_config.json: rank and scale. Fields are those of peft's LoraConfig (0.18 to 0.21).

MAX_RANK = 1024  # a higher one is no smaller than full weights, and merging it costs more than the training did
MAX_ALPHA = 1e9  # keeps every scale a finite fp32 value
# Values of `init_lora_weights` that leave the base weights unchanged, as pissa, olora, corda, loftq and lora_ga don't.
HARMLESS_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")

READ = frozenset(["bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "target_modules", "use_rslora"])
NOT_READ = frozenset([
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "task_type",
])  # fmt: skip
"""Fields that don't change the merged weights. Any other one must be empty: DoRA, ranks and scales by layer, trained biases or
tokens, and what later versions of peft may add."""


@dataclass(frozen=True)
class LoraSettings:
    """Settings of a plain LoRA adapter."""

    rank: int
    scale: float  # factor of B @ A: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732)
    targets: frozenset[str] | None  # ends of the adapted modules' names; None for a pattern, which is not run

    def targets_module(self, module: str) -> bool:
        """Return whether peft would give this module an adapter."""
        return self.targets is None or any(f".{module}".endswith(f".{end}") for end in self.targets)


def read_settings(config: Mapping[str, Any]) -> LoraSettings:
    """Read a plain LoRA adapter's settings. Raises Refused: a wrong value, or more than plain LoRA (`adapter_unsupported`)."""
    kind, bias, start = config.get("peft_type"), config.get("bias", "none"), config.get("init_lora_weights")
    if kind != "LORA":
        raise _unsupported("peft_type", kind, "only LORA is merged")
    for field in sorted(set(config) - READ - NOT_READ):
        value = config[field]
        if value is not None and value is not False and value not in ("", [], {}):
            raise _unsupported(field, value, "it must be left out, null or false")
    if bias != "none":
        raise _unsupported("bias", bias, "only `none` is merged")
    if type(start) not in (type(None), bool, str) or start not in HARMLESS_STARTS:
        raise _unsupported("init_lora_weights", start, "it changes the base model's own weights, or may")
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)  # peft's defaults
    rslora, targets = config.get("use_rslora", False), config.get("target_modules")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise _wrong("r", rank, f"a whole number from 1 to {MAX_RANK}")
    if type(alpha) not in (int, float) or not abs(alpha) <= MAX_ALPHA:  # NaN too
        raise _wrong("lora_alpha", alpha, f"a number of at most {MAX_ALPHA:.0e}")
    if not isinstance(rslora, bool):
        raise _wrong("use_rslora", rslora, "true or false")
    names = frozenset(targets) if isinstance(targets, list) and all(isinstance(each, str) for each in targets) else None
    if names is None and not (targets is None or isinstance(targets, str)):
        raise _wrong("target_modules", targets, "a list of names")
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    return LoraSettings(rank, scale, names)


def _unsupported(field: str, value: Any, why: str) -> Refused:
    what = f"{ADAPTER_CONFIG}: field {field[:100]} is {repr(value)[:100]}; {why}"
    return Refused("adapter_unsupported", what, MERGE_YOURSELF)


def _wrong(field: str, value: Any, needed: str) -> Refused:
    # A hostile integer may be too long for repr.
    shown = "a huge number" if isinstance(value, int) and value.bit_length() > 300 else repr(value)[:100]
    what = f"{ADAPTER_CONFIG}: field {field} is {shown}; needed is {needed}"
    return Refused("adapter_config", what, f"save the adapter again with peft, or {MERGE_YOURSELF}")


# --- the adapter's tensors beside the base model's

FACTOR = re.compile(r"base_model\.model\.(?P<module>[^\n]+)\.lora_(?P<side>[AB])\.weight")

TRANSPOSED_TYPES = frozenset({"gpt2", "openai-gpt"})  # layers store (in, out), which would need `fan_in_fan_out`


@dataclass(frozen=True)
class Delta:
    """The change scale * B @ A of one weight, with A (rank, in) and B (out, rank)."""

    a: TensorSpec
    b: TensorSpec
    scale: float


@dataclass
class LintedAdapter(Linted):
    """An open adapter that fits the base model, whose files are copied. `deltas` is keyed by the base model's tensor names."""

    fd: int = -1
    deltas: Mapping[str, Delta] = dataclasses.field(default_factory=dict)
    named: str | None = None  # the base model that adapter_config.json names

    def as_record(self) -> MergedAdapter:
        """Return what the ledger records about the adapter."""
        return MergedAdapter(rank=max(delta.a.shape[0] for delta in self.deltas.values()), tensors=len(self.deltas))


def lint_adapter(folder: SubmittedFolder, base: BaseModel) -> LintedAdapter:
    """Check an adapter's config and header against the base model. Raises Refused; OSError: the file system failed."""
    _one_adapter_alone(folder.sizes)
    config = folder.read_json(ADAPTER_CONFIG)
    settings, named = read_settings(config), config.get("base_model_name_or_path")
    if base.config.get("model_type") in TRANSPOSED_TYPES:
        what = f"{ADAPTER_CONFIG}: adapters of a {base.config['model_type']} are not merged"
        raise Refused("adapter_unsupported", what, MERGE_YOURSELF)
    fd = folder.open_regular(ADAPTER_WEIGHTS)
    modules: dict[str, dict[str, TensorSpec]] = {}
    for tensor in folder.read_tensors(fd, ADAPTER_WEIGHTS, base):
        found = FACTOR.fullmatch(tensor.name)
        if found is None:
            raise _no_factor(tensor.name, base)
        modules.setdefault(found["module"], {})[found["side"]] = tensor
    deltas = {f"{name}.weight": _delta(name, pair, settings, base) for name, pair in sorted(modules.items())}
    if "config.json" in folder.sizes:  # written by some trainers, not by peft
        compare_config(folder.read_json("config.json"), base.config)
    files, tensors = base.open_weights(folder.stack)
    extra_head = base.tied and HEAD_NAME in {tensor.name for tensor in tensors}
    ignored = ignored_names(folder, {*ADAPTER_FILES, "config.json"})
    named = named if isinstance(named, str) and named else None
    return LintedAdapter(files, tensors, ignored, extra_head, None, fd, deltas, named)


def _one_adapter_alone(sizes: dict[str, int]) -> None:
    first = sorted(ADAPTER_FILES & set(sizes))[0]
    others = sorted(n for n in sizes if (n.endswith(".safetensors") or n == INDEX_NAME) and n != ADAPTER_WEIGHTS)
    if others:
        advice = "submit a folder with the adapter alone, or one with the full weights alone"
        raise Refused("adapter_beside_model", f"{first} lies beside {others[0][:120]}: which one is meant?", advice)
    if ADAPTER_WEIGHTS not in sizes and ADAPTER_PICKLE in sizes:
        advice = "save the adapter with `save_pretrained(DIR, safe_serialization=True)`"
        raise Refused("pickle", f"{ADAPTER_PICKLE}: weights as pickle are not read", advice)
    missing = next((name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if name not in sizes), None)
    if missing is not None:
        what = f"{missing} is missing beside {first}"
        raise Refused("adapter_incomplete", what, "save the adapter with `model.save_pretrained(DIR)` of peft")


def _delta(module: str, pair: dict[str, TensorSpec], settings: LoraSettings, base: BaseModel) -> Delta:
    name, shown, rank = f"{module}.weight", module[:150], settings.rank
    shape = base.shapes.get(name)
    if shape is None and name == HEAD_NAME and base.tied:
        raise _names(f"{HEAD_NAME} is the embedding in this base model (tied): an adapter would change both")
    if shape is None or len(shape) != 2 or name == base.embedding:
        why, advice = explain_names([name], base.shapes) or ("", "")
        what = f"the base model has no linear layer {shown!r}{why and f': {why}'}"
        raise _names(what, f"{advice}; or " if advice else "")
    if set(pair) != {"A", "B"}:
        raise _names(f"layer {shown} has lora_{min(pair)} and no lora_{'B' if 'A' in pair else 'A'}")
    if not settings.targets_module(module):
        raise _names(f"layer {shown} is not one of target_modules in {ADAPTER_CONFIG}: peft would leave it out")
    for tensor, needed in ((pair["A"], (rank, shape[1])), (pair["B"], (shape[0], rank))):
        if tensor.shape != needed:
            what = f"{ADAPTER_WEIGHTS}: tensor {tensor.name[:150]} has shape {list(tensor.shape)}; "
            what += f"the base model and rank {rank} of {ADAPTER_CONFIG} need {list(needed)}"
            advice = "train the adapter on the base model of this run, and save it with peft"
            raise Refused("adapter_shapes", what, advice)
    return Delta(pair["A"], pair["B"], settings.scale)


WRAPPED = re.compile(r"(?P<module>[^\n]+)\.lora_[AB]\.(?:(?P<adapter>[^.\n]+)\.)?weight")
"""A factor's name with what a wrapper puts before it, and the adapter's name, which peft leaves out when it saves."""


def _no_factor(name: str, base: BaseModel) -> Refused:
    what = f"tensor {name[:150]!r} is no lora_A or lora_B of a linear layer"
    if found := WRAPPED.fullmatch(name):
        path = f"{found['module'].replace('base_model.model.', '', 1)}.weight"
        why = [] if found["adapter"] is None else [f"names hold the adapter's name, {found['adapter'][:50]!r}"]
        if more := explain_names([path], base.shapes):
            why.append(more[0])
        elif "base_model.model." not in name:
            why.append("names lack the prefix 'base_model.model.'")
        save = "save the model inside the wrapper with peft: `model.save_pretrained(DIR)`; or "
        return _names(f"{what}: {' and '.join(why)}" if why else what, save)
    if ".lora_" in name or not name.endswith(".weight"):
        return _names(what)
    # peft saves whole embeddings by itself if they were trained or the vocabulary was resized.
    save = "save the adapter with `save_pretrained(DIR, save_embedding_layers=False)`"
    return _names(what, f"{save} if only lora_A and lora_B were trained; else ")


def _names(what: str, instead: str = "") -> Refused:
    return Refused("adapter_names", f"{ADAPTER_WEIGHTS}: {what}", f"{instead}{MERGE_YOURSELF}")


# --- merge of base weights and LoRA factors by blocks of rows, in fp32, rounded to nearest even as peft does


@functools.cache
def one_threaded_numpy() -> ModuleType:
    """Import numpy with one BLAS thread, if it isn't loaded: a copy has threads itself, and BLAS ones would take ten times as long."""
    names = [name for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS") if name not in os.environ]
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        import numpy
    finally:
        for name in names:  # agents are started with variables of this process
            os.environ.pop(name, None)
    return numpy


class Merge:
    """Adds one delta to the rows of a base weight (out, in). Holds A in fp32 and reads B by blocks of rows. Raises Refused: A, B or
    the sum holds NaN or Inf, or the file became shorter; OSError: the file system failed."""

    def __init__(self, adapter: LintedAdapter, target: TensorSpec) -> None:
        self.fd, self.delta, self.target = adapter.fd, adapter.deltas[target.name], target
        self.a = self._factor(self.delta.a, 0, self.delta.a.shape[0])

    def add_to(self, raw: memoryview, first: int) -> None:
        """Add the adapter in place to `raw`, whole rows in the base model's dtype, of which `first` is the first one's index."""
        import numpy as np

        dtype = self.target.dtype
        weights = np.frombuffer(raw, dtype=STORED[dtype]).reshape(-1, self.target.shape[1])
        b = self._factor(self.delta.b, first, len(weights))
        with np.errstate(all="ignore"):
            change = np.matmul(b, self.a)
            change *= np.float32(self.delta.scale)
            total = widen(weights, dtype)
            total += change
            if not np.isfinite(total).all():
                raise _not_finite(f"{self.target.name} with the adapter added")
            # Copy only values that change: -0.0 + 0.0 is 0.0, and an untrained adapter must give the base model's bytes.
            np.copyto(weights, narrow(total, dtype), where=change != 0)

    def _factor(self, tensor: TensorSpec, first: int, count: int) -> Matrix:
        import numpy as np

        row = tensor.shape[1] * ITEM_BYTES[tensor.dtype]
        data = bytearray(count * row)
        read_exactly(self.fd, memoryview(data), tensor.begin + first * row, ADAPTER_WEIGHTS)
        values = widen(np.frombuffer(data, dtype=STORED[tensor.dtype]).reshape(count, tensor.shape[1]), tensor.dtype)
        if not np.isfinite(values).all():
            raise _not_finite(tensor.name[:150])
        return values


def _not_finite(name: str) -> Refused:
    what = f"{ADAPTER_WEIGHTS}: {name} holds NaN or Inf"
    return Refused("not_finite", what, "the training diverged: submit an earlier adapter")
