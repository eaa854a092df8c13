"""Worker extension inside vLLM's model processes: read a checkpoint, verify its hash, swap it in, verify the result.

vLLM mixes `Weights` into its worker class (`worker_extension_cls`); `collective_rpc` calls it by name in every process of a
tensor-parallel group, with plain values. Each process reads and hashes the whole checkpoint, so none uses bytes that it did
not check. Imports only the suite's standard library code.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autorl_hpc.files.checkpoint import HEAD_NAME
from autorl_hpc.files.processes import deny_inspection, die_with_parent
from autorl_hpc.grading.engines.weights_cache import Checkpoint, WeightsCache
from autorl_hpc.rollouts.engine import WeightsChanged

FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
"""Tensors that vLLM stacks in one parameter, by the first of them."""

SLEPT = "Memory usage increased after sleeping"
CHECKED_ROWS = 64  # Rows compared at the beginning and at the end of a tensor

CHECKED_LARGE = 24
"""Tensors with rows that are compared, spread over the model; tensors without rows are all compared. Comparing everything
would take longer than the swap."""


class Weights:
    """Mixed into vLLM's worker. Returns lists and dicts of plain values, errors included, because an exception from another
    process would not keep its type."""

    model_runner: Any
    device: Any
    sleep: Any

    def autorl_prepare(self, cache_bytes: int, tied: list[str], shapes: dict[str, list[int]]) -> None:
        """Prepare the process; called once, first. `shapes` are the base model's tensors, which every checkpoint must have."""
        deny_inspection()
        die_with_parent()  # a child of the worker must not outlive it and hold the GPU
        self._autorl_tied = frozenset(tied)
        self._autorl_shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._autorl_cache = WeightsCache(cache_bytes, self._autorl_tied)
        self._autorl_next: Checkpoint | None = None
        if hasattr(self, "sleep"):
            self.sleep = asleep_beside_others(self.sleep)

    def autorl_prefetch(self, folder: str, wanted: str) -> None:
        """Start reading a checkpoint in the background."""
        self._autorl_cache.prefetch(Path(folder), wanted)

    def autorl_fetch(self, folder: str, wanted: str, wait_s: float) -> list[Any]:
        """Wait for a checkpoint: ["ready"], ["waiting"], ["changed", why], ["unread", errno, why] or ["misfit", why]."""
        if self._autorl_next is not None and self._autorl_next.content_hash == wanted:
            return ["ready"]
        try:
            self._autorl_next = self._autorl_cache.take(Path(folder), wanted, wait_s)
        except WeightsChanged as error:
            return ["changed", str(error)]
        except OSError as error:
            return ["unread", error.errno, str(error)]
        if self._autorl_next is None:
            return ["waiting"]
        found = {
            tensor.name: tensor.shape for tensor in self._autorl_next.tensors if tensor.name not in self._autorl_tied
        }
        known = self._autorl_shapes
        if other := [name for name in {*found, *known} if found.get(name) != known.get(name)]:  # vLLM doesn't check all
            self._autorl_next = None
            return ["misfit", f"{len(other)} tensors are not the base model's in name or shape, such as {min(other)}"]
        return ["ready"]

    def autorl_swap(self, wanted: str) -> dict[str, Any]:
        """Load the fetched checkpoint: {"checked", "tensors", "swap_s"}, or {"wrong": why}; then the model is unusable."""
        started = time.monotonic()
        checkpoint, self._autorl_next = self._autorl_next, None
        if checkpoint is None or checkpoint.content_hash != wanted:
            return {"wrong": "nothing was fetched"}
        model = self.model_runner.get_model()
        needed = {name for name, _ in model.named_parameters()}
        loaded = self._autorl_load(model, checkpoint)
        if loaded is None:
            return {"wrong": "vLLM does not say which weights it took"}
        if missing := sorted(needed - loaded):
            return {"wrong": f"vLLM took no weights for {len(missing)} of its parameters, such as {missing[0]}"}
        heads = [tensor.name for tensor in checkpoint.tensors if tensor.name not in {*self._autorl_tied, *needed}]
        if HEAD_NAME in heads and not any(name.endswith(HEAD_NAME) for name in loaded):
            return {
                "wrong": f"vLLM takes the embedding for {HEAD_NAME}, and the base model's config and files do not tie them"
            }
        problem, checked = _compare(model, checkpoint, self._autorl_tied)
        if problem:
            return {"wrong": problem}
        return {"checked": checked, "tensors": len(checkpoint.tensors), "swap_s": time.monotonic() - started}

    def _autorl_load(self, model: Any, checkpoint: Checkpoint) -> set[str] | None:
        """Load the checkpoint and return the names that the model's loader reports as loaded."""
        taken: list[set[str] | None] = []
        load_weights = model.load_weights

        def listening(weights: Any) -> Any:
            found = load_weights(weights)
            taken.append(None if found is None else set(found))
            return found

        model.load_weights = listening
        try:
            # As vLLM's loaders expect them, without tied copies, which the embedding fills.
            named = (
                (tensor.name, tensor.as_torch())
                for tensor in checkpoint.tensors
                if tensor.name not in self._autorl_tied
            )
            self.reload_weights(weights_iterator=named)  # type: ignore[attr-defined]
        finally:
            del model.load_weights
        # On a CPU vLLM computes with packed copies of weights, and its reload skips a tied head, which receives no weights.
        for layer in model.modules():
            weight = getattr(layer, "weight", None)
            if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
        return taken[0] if taken else None


def asleep_beside_others(sleep: Callable[..., None]) -> Callable[..., None]:
    """Wrap vLLM's sleep for a shared GPU: it fails if less memory is free than before, though other workers may have taken it."""

    def sleeping(*args: Any, **kwargs: Any) -> None:
        try:
            sleep(*args, **kwargs)
        except AssertionError as error:
            if SLEPT not in str(error):
                raise
            print(f"others took memory while this process freed its own ({error})", flush=True)

    return sleeping


def _compare(model: Any, checkpoint: Checkpoint, tied: frozenset[str]) -> tuple[str, int]:
    """Compare parameters on the device with the data read, as far as vLLM stores them unchanged (not split, not packed for a CPU);
    return the problem or "", and the number of tensors compared."""
    parameters = dict(model.named_parameters())
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors if tensor.name not in tied}
    vectors: list[tuple[str, Any, int]] = []
    large: list[tuple[str, Any, int]] = []
    for name, tensor in tensors.items():
        found = _place(name, tensors, parameters)
        if found is not None:
            (vectors if len(tensor.shape) < 2 else large).append((name, *found))
    step = max(1, len(large) // CHECKED_LARGE)
    chosen = [*vectors, *large[::step], *large[-1:]]
    for name, parameter, first_row in chosen:
        value = tensors[name].as_torch()
        rows = value.shape[0]
        spans = [(0, rows)] if value.dim() < 2 else [(0, CHECKED_ROWS), (max(0, rows - CHECKED_ROWS), rows)]
        for begin, end in spans:
            part = value[begin:end].to(parameter.dtype)
            there = parameter.data[first_row + begin : first_row + begin + part.shape[0]].cpu()
            if there.shape != part.shape or not bool((there == part).all()):
                return f"{name} on the device is not what was read", 0
    return "", len({name for name, _, _ in chosen})


def _place(name: str, tensors: dict[str, Any], parameters: dict[str, Any]) -> tuple[Any, int] | None:
    """Return the parameter that holds a tensor and its first row there; None if vLLM stores it in another form."""
    shape = tensors[name].shape
    own = parameters.get(name)
    if own is not None:
        # a padded vocabulary
        padded = len(shape) == 2 and tuple(own.shape[1:]) == shape[1:] and own.shape[0] >= shape[0]
        return (own, 0) if tuple(own.shape) == shape or padded else None
    for fused, parts in FUSED.values():
        for number, part in enumerate(parts):
            if f".{part}." not in name:
                continue
            whole = parameters.get(name.replace(f".{part}.", f".{fused}."))
            siblings = [tensors.get(name.replace(f".{part}.", f".{other}.")) for other in parts]
            if whole is None or any(sibling is None for sibling in siblings):
                return None
            rows = [sibling.shape[0] for sibling in siblings if sibling is not None]
            if tuple(whole.shape) != (sum(rows), *shape[1:]):
                return None
            return whole, sum(rows[:number])
    return None
