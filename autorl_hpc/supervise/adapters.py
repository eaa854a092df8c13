"""Check a submitted LoRA adapter by its headers, open it, and merge it into the base model: W + (B @ A) * scale.

transformers would load the base model that an adapter names. Here the factors are added only to the staged, pinned one.
Tensors as in peft's `save_pretrained`: `base_model.model.<module>.lora_A.weight` (rank, in), `.lora_B.weight` (out, rank).
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autorl_hpc.errors import Refused
from autorl_hpc.files.checkpoint import HEAD_NAME, INDEX_NAME, ITEM_BYTES, TensorSpec, read_header
from autorl_hpc.records.entries import MergedAdapter
from autorl_hpc.supervise.checkpoint_folder import BaseModel, SubmittedFolder, max_header_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float32]
    Bits = npt.NDArray[np.uint32]

# --- adapter_config.json: rank and scale. Fields are those of peft's LoraConfig (0.18 to 0.21).
# `base_model_name_or_path`, `revision` and `auto_mapping` are ignored. Other fields must be empty, since their effect is
# unknown.

ADAPTER_CONFIG = "adapter_config.json"

MERGE_YOURSELF = "merge it yourself: `model.merge_and_unload().save_pretrained(DIR)`, and submit that folder"

MAX_RANK = 1024
"""An adapter of a higher rank is no smaller than full weights, and merging it costs more than the training did."""

MAX_ALPHA = 1e9
"""Keeps every scale a finite fp32 value."""

HARMLESS_STARTS = ("gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights`, besides true and false, that leave the base weights unchanged. pissa, olora, corda, loftq
and lora_ga change the base weights, so their factors don't fit the staged base model."""

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
"""Fields that don't change the merged weights. The tensors themselves show which layers have factors."""

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
"""Module names, as peft writes them into `rank_pattern` and `alpha_pattern`. Other expressions are not run: one may run
forever."""


@dataclass(frozen=True)
class _Pattern:
    """One key of rank_pattern or alpha_pattern, matched as peft's `get_pattern_key` does."""

    last: str  # a matching name must end with this; it is checked first, because the regular expression is slow
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
    """Settings of a plain LoRA adapter, which only adds scale * B @ A to some weights."""

    rank: int
    alpha: float
    rslora: bool
    ranks: tuple[_Pattern, ...]
    alphas: tuple[_Pattern, ...]
    targets: frozenset[str] | None

    def rank_of(self, module: str) -> int:
        """Return the rank that the config gives to a module."""
        return int(_first(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor of B @ A for a module: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732)."""
        rank = self.rank_of(module)
        return _first(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def targets_module(self, module: str) -> bool:
        """Return whether peft would give this module an adapter; True if `target_modules` is a pattern, which is not run."""
        if self.targets is None:
            return True
        parts = module.split(".")
        return any(".".join(parts[start:]) in self.targets for start in range(len(parts)))


def read_settings(config: Mapping[str, Any], max_patterns: int) -> LoraSettings:
    """Read the settings of a plain LoRA adapter.

    Args:
        max_patterns: limit for the keys of `rank_pattern` and `alpha_pattern` each: the base model's number of tensors.

    Raises:
        Refused: a field has a wrong value (`adapter_config`), or asks for more than plain LoRA (`adapter_unsupported`).
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
    """Refuse DoRA, biases, more modules or tokens, replicated layers, other variants, and fields of later versions of peft."""
    for field in sorted(set(config) - READ - NOT_READ):
        value = config[field]
        if value is not None and value is not False and value not in ("", [], {}):
            raise _unsupported(field, value, "it must be left out, null or false")


def _rank(field: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise _wrong(field, value, f"a whole number from 1 to {MAX_RANK}")
    return value


def _alpha(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MAX_ALPHA:  # NaN too
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
    """Format a value for a message; a hostile integer may be too long for repr."""
    return "a huge number" if isinstance(value, int) and value.bit_length() > 300 else repr(value)[:100]


ADAPTER_WEIGHTS, ADAPTER_PICKLE = "adapter_model.safetensors", "adapter_model.bin"
ADAPTER_FILES = frozenset({ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLE})

FACTOR = re.compile(r"base_model\.model\.(?P<module>[^\n]+)\.lora_(?P<side>[AB])\.weight")

TRANSPOSED_TYPES = frozenset({"gpt2", "openai-gpt"})
"""Architectures whose layers store weights as (in, out); merging these needs `fan_in_fan_out`, which is not supported."""


@dataclass(frozen=True)
class Delta:
    """The change scale * B @ A of one weight, with A (rank, in) and B (out, rank)."""

    a: TensorSpec
    b: TensorSpec
    scale: float


@dataclass(frozen=True)
class Adapter:
    """An open adapter that fits the base model. `deltas` is keyed by the base model's tensor names."""

    fd: int
    deltas: dict[str, Delta]

    @property
    def rank(self) -> int:
        """Return the largest rank of any layer."""
        return max(delta.a.shape[0] for delta in self.deltas.values())

    def as_record(self) -> MergedAdapter:
        """Return what the ledger records about the adapter."""
        return MergedAdapter(rank=self.rank, tensors=len(self.deltas))


def lint_adapter(folder: SubmittedFolder, base: BaseModel) -> Adapter:
    """Check an adapter's config and header against the base model.

    Raises:
        Refused: with a code, the file and field, and advice.
        OSError: the file system failed.
    """
    _one_adapter_alone(folder.sizes)
    settings = read_settings(folder.read_json(ADAPTER_CONFIG), len(base.shapes))
    if base.config.get("model_type") in TRANSPOSED_TYPES:
        what = f"{ADAPTER_CONFIG}: adapters of a {base.config['model_type']} are not merged"
        raise Refused("adapter_unsupported", what, MERGE_YOURSELF)
    fd = folder.open_regular(ADAPTER_WEIGHTS)
    modules: dict[str, dict[str, TensorSpec]] = {}
    for tensor in read_header(fd, ADAPTER_WEIGHTS, max_header_bytes(base)):
        found = FACTOR.fullmatch(tensor.name)
        if found is None:
            raise _no_factor(tensor.name)
        modules.setdefault(found["module"], {})[found["side"]] = tensor
    return Adapter(fd, {f"{name}.weight": _delta(name, pair, settings, base) for name, pair in sorted(modules.items())})


def _one_adapter_alone(sizes: dict[str, int]) -> None:
    others = sorted(n for n in sizes if (n.endswith(".safetensors") or n == INDEX_NAME) and n != ADAPTER_WEIGHTS)
    if others:
        raise Refused(
            "adapter_beside_model",
            f"{sorted(ADAPTER_FILES & set(sizes))[0]} lies beside {others[0][:120]}: which is meant?",
            "submit a folder with the adapter alone, or one with the full weights alone",
        )
    if ADAPTER_WEIGHTS not in sizes and ADAPTER_PICKLE in sizes:
        raise Refused(
            "pickle",
            f"{ADAPTER_PICKLE}: weights as pickle are not read",
            "save the adapter with `save_pretrained(DIR, safe_serialization=True)`",
        )
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if name not in sizes:
            what = f"{name} is missing beside {sorted(ADAPTER_FILES & set(sizes))[0]}"
            raise Refused("adapter_incomplete", what, "save the adapter with `model.save_pretrained(DIR)` of peft")


def _delta(module: str, pair: dict[str, TensorSpec], settings: LoraSettings, base: BaseModel) -> Delta:
    name, shown = f"{module}.weight", module[:150]
    shape = base.shapes.get(name)
    if shape is None and name == HEAD_NAME and base.tied:
        raise _names(f"{HEAD_NAME} is the embedding in this base model (tied): an adapter would change both")
    if shape is None or len(shape) != 2 or name == base.embedding:
        raise _names(f"the base model has no linear layer {shown!r}")
    if set(pair) != {"A", "B"}:
        raise _names(f"layer {shown} has lora_{min(pair)} and no lora_{'B' if 'A' in pair else 'A'}")
    if not settings.targets_module(module):
        raise _names(f"layer {shown} is not one of target_modules in {ADAPTER_CONFIG}: peft would leave it out")
    rank = settings.rank_of(module)
    for tensor, needed in ((pair["A"], (rank, shape[1])), (pair["B"], (shape[0], rank))):
        if tensor.shape != needed:
            raise Refused(
                "adapter_shapes",
                f"{ADAPTER_WEIGHTS}: tensor {tensor.name[:150]} has shape {list(tensor.shape)}; the base model and rank "
                f"{rank} of {ADAPTER_CONFIG} need {list(needed)}",
                "train the adapter on the base model of this run, and save it with peft",
            )
    return Delta(pair["A"], pair["B"], settings.scale_of(module))


def _no_factor(name: str) -> Refused:
    what = f"tensor {name[:150]!r} is no lora_A or lora_B of a linear layer"
    if ".lora_" in name or not name.endswith(".weight"):
        return _names(what)
    # peft saves whole embeddings by itself if they were trained or the vocabulary was resized.
    advice = f"save the adapter with `save_pretrained(DIR, save_embedding_layers=False)` if only lora_A and lora_B were trained; else {MERGE_YOURSELF}"
    return Refused("adapter_names", f"{ADAPTER_WEIGHTS}: {what}", advice)


def _names(what: str) -> Refused:
    return Refused("adapter_names", f"{ADAPTER_WEIGHTS}: {what}", MERGE_YOURSELF)


# --- one BLAS thread: merging runs several threads itself, and BLAS threads would compete with them for busy cores.
# Measured on two busy cores, an adapter of rank 16 on 48 matrices of (101, 1024): intake took 3.1 s, and 0.3 s with one
# thread.

SETTERS = (
    "scipy_openblas_set_num_threads64_",  # numpy's wheels
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
    "MKL_Set_Num_Threads",
)


@functools.cache
def use_one_thread() -> bool:
    """Set BLAS to one thread for this process. Return False if no loaded library has the setting; results are the same."""
    import numpy  # noqa: F401  loads the library

    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = sorted({line.split(maxsplit=5)[5].strip() for line in maps if re.search(r"blas|mkl_rt", line)})
    except OSError:
        return False
    found = False
    for path in paths:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in SETTERS:
            setter = getattr(library, name, None)
            if setter is not None:
                setter.argtypes, setter.restype = [ctypes.c_int], None
                setter(1)
                found = True
    return found


# --- merge of base weights and LoRA factors by blocks of rows, in fp32, rounded to nearest even as peft does

BLOCK_VALUES = 256 * 1024
"""1 MiB in fp32, so that a block stays in the CPU cache."""


class Merge:
    """Adds one delta to the rows of a base weight. Holds A in fp32 and reads B by blocks of rows."""

    def __init__(self, adapter: Adapter, target: TensorSpec) -> None:
        """Read A.

        Args:
            target: the base model's tensor, (out, in).

        Raises:
            Refused: A holds NaN or Inf, or the file became shorter.
            OSError: the file system failed.
        """
        import numpy as np

        use_one_thread()
        self.fd, self.delta, self.target = adapter.fd, adapter.deltas[target.name], target
        self.a = self._factor(self.delta.a, 0, self.delta.a.shape[0])
        self.scale = np.float32(self.delta.scale)
        rows, columns = target.shape
        self.block = min(rows, max(1, BLOCK_VALUES // columns))
        self._change, self._sum = (np.empty((self.block, columns), np.float32) for _ in range(2))
        self._spare = np.empty((self.block, columns), np.uint32)

    def add_to(self, raw: memoryview, first: int) -> None:
        """Add the adapter to some rows, in place.

        Args:
            raw: writable bytes of whole rows, in the base model's dtype.
            first: index of the first of these rows.

        Raises:
            Refused: B or the sum holds NaN or Inf, or the adapter's file became shorter.
            OSError: the file system failed.
        """
        import numpy as np

        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[self.target.dtype]
        weights = np.frombuffer(raw, dtype=kind).reshape(-1, self.target.shape[1])
        b = self._factor(self.delta.b, first, len(weights))
        for start in range(0, len(weights), self.block):
            part = weights[start : start + self.block]
            change, total, spare = self._change[: len(part)], self._sum[: len(part)], self._spare[: len(part)]
            with np.errstate(all="ignore"):
                np.matmul(b[start : start + self.block], self.a, out=change)
                change *= self.scale
                widen(part, self.target.dtype, total)
                total += change
                if not np.isfinite(total).all():
                    raise _not_finite(f"{self.target.name} with the adapter added")
                stored = narrow(total, self.target.dtype, spare)
            # Copy only values that change: -0.0 + 0.0 is 0.0, and an untrained adapter must give the base model's bytes.
            np.copyto(part, stored, where=change != 0, casting="unsafe")

    def _factor(self, tensor: TensorSpec, first: int, count: int) -> Matrix:
        import numpy as np

        row = tensor.shape[1] * ITEM_BYTES[tensor.dtype]
        data, begin = bytearray(count * row), tensor.begin + first * row
        got = 0
        while got < len(data):
            part = os.preadv(self.fd, [memoryview(data)[got:]], begin + got)
            if part <= 0:
                raise Refused(
                    "artifact_changed",
                    f"{ADAPTER_WEIGHTS} became shorter while it was merged",
                    "submit after the save has ended",
                )
            got += part
        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[tensor.dtype]
        raw = np.frombuffer(data, dtype=kind).reshape(count, tensor.shape[1])
        values = np.empty(raw.shape, np.float32)
        widen(raw, tensor.dtype, values)
        if not np.isfinite(values).all():
            raise _not_finite(tensor.name[:150])
        return values


def _not_finite(name: str) -> Refused:
    what = f"{ADAPTER_WEIGHTS}: {name} holds NaN or Inf"
    return Refused("not_finite", what, "the training diverged: submit an earlier adapter")


def widen(stored: npt.NDArray[Any], dtype: str, into: Matrix) -> None:
    """Convert values of a safetensors dtype (F32, F16; BF16 as uint16) to fp32 exactly, into `into`."""
    import numpy as np

    if dtype == "BF16":
        bits = into.view(np.uint32)
        np.copyto(bits, stored)
        bits <<= 16
    else:
        np.copyto(into, stored)


def narrow(values: Matrix, dtype: str, spare: Bits) -> npt.NDArray[Any]:
    """Convert finite fp32 values to a safetensors dtype, rounded to nearest even; values that are too large become Inf.

    Args:
        values: may be overwritten.
        spare: scratch array of the same shape.

    Returns:
        fp32, fp16, or for BF16 its bits in the lower half of uint32.
    """
    import numpy as np

    if dtype == "F32":
        return values
    if dtype == "F16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    np.right_shift(bits, 16, out=spare)
    spare &= 1
    spare += 0x7FFF
    bits += spare
    bits >>= 16
    return bits
