"""A submitted LoRA adapter, checked by its headers and opened.

transformers loads the base that an adapter names, from the working directory first. Here the factors are added to the
staged, pinned base model and to nothing else (merging.py). Layout: peft's `save_pretrained`, tensors `base_model.model.<module>.lora_A.weight` (rank, in) and
`.lora_B.weight` (out, rank).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autorl_hpc.errors import Refused
from autorl_hpc.files.checkpoint import HEAD_NAME, INDEX_NAME, TensorSpec, read_header
from autorl_hpc.records.ledger import MergedAdapter
from autorl_hpc.supervise.adapter_config import ADAPTER_CONFIG, MERGE_YOURSELF, LoraSettings, read_settings
from autorl_hpc.supervise.basemodel import BaseModel
from autorl_hpc.supervise.submitted import Submitted, max_header_bytes

ADAPTER_WEIGHTS, ADAPTER_PICKLE = "adapter_model.safetensors", "adapter_model.bin"
ADAPTER_FILES = frozenset({ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLE})

FACTOR = re.compile(r"base_model\.model\.(?P<module>[^\n]+)\.lora_(?P<side>[AB])\.weight")

TRANSPOSED_TYPES = frozenset({"gpt2", "openai-gpt"})
"""Architectures whose layers store weights as (in, out): peft merges them by `fan_in_fan_out`, which is not supported."""


@dataclass(frozen=True)
class Delta:
    """scale * B @ A, of A (rank, in) and B (out, rank)."""

    a: TensorSpec
    b: TensorSpec
    scale: float


@dataclass(frozen=True)
class Adapter:
    """An open adapter that fits the base: what it adds, by the name of the base's tensor."""

    fd: int
    deltas: dict[str, Delta]

    @property
    def rank(self) -> int:
        """The largest rank in it."""
        return max(delta.a.shape[0] for delta in self.deltas.values())

    def as_record(self) -> MergedAdapter:
        """What the ledger keeps of it."""
        return MergedAdapter(rank=self.rank, tensors=len(self.deltas))


def lint_adapter(folder: Submitted, base: BaseModel) -> Adapter:
    """Checks an adapter against the base model, from its config and header.

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
    # peft adds whole embeddings by itself where one is trained on, or the vocabulary was changed.
    advice = f"save the adapter with `save_pretrained(DIR, save_embedding_layers=False)` if only lora_A and lora_B were trained; else {MERGE_YOURSELF}"
    return Refused("adapter_names", f"{ADAPTER_WEIGHTS}: {what}", advice)


def _names(what: str) -> Refused:
    return Refused("adapter_names", f"{ADAPTER_WEIGHTS}: {what}", MERGE_YOURSELF)
