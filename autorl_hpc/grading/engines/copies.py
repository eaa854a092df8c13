"""Several workers on one GPU: how many, and how much of its memory each may take.

With a small model vLLM's own Python, one thread of a worker, is the bound, and the GPU waits. Standard library only: the worker reads
this too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SIZES = ((500_000_000, 4), (1_500_000_000, 2))
"""Workers on one GPU for models with fewer parameters than that; one for larger ones."""

CORES_EACH = 3
"""A worker's thread, what it starts beside it, and the daemon's and the environments' share."""

SEQUENCES = 256
"""That one of several workers answers at a time: together they have as many as vLLM's default on a large GPU, or fewer."""

STEP_TOKENS = 8192
"""That one of several workers computes in a step. A last layer's inputs and outputs take memory by this number."""

FIXED_BYTES = 2 << 30
"""Of each worker: CUDA's context and libraries, recorded graphs, and room to spare."""

LOGIT_BYTES = 48
"""Of a sequence and word of the vocabulary: logits, sorted with their places, summed and drawn from."""

Shapes = Mapping[str, Sequence[int]]


def parameters(shapes: Shapes) -> int:
    """Of a model, from its tensors' shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


def fitting(shapes: Shapes, cores: int, groups: int) -> int:
    """How many workers suit a GPU, by the model's size and the cores that all workers of the daemon share.

    Args:
        groups: GPUs that have workers.
    """
    size = parameters(shapes)
    wanted = next((count for limit, count in SIZES if size < limit), 1)
    return max(1, min(wanted, cores // (CORES_EACH * groups)))


def cache_bytes(share: int, shapes: Shapes, item: int) -> int:
    """Bytes of keys and values for a worker that has `share` bytes of a GPU: what weights, sampler and layers leave. Not positive
    where there is no room.

    vLLM itself would measure its needs while it starts, and takes what its neighbours on the GPU do meanwhile for its own.

    Args:
        item: bytes of a number.
    """
    matrices = [shape for shape in shapes.values() if len(shape) == 2]
    rows, hidden = max(((shape[0], shape[1]) for shape in matrices), default=(0, 0))  # the embedding
    widest = max((shape[0] for shape in matrices if shape[0] != rows), default=hidden)
    layers = STEP_TOKENS * (8 * hidden + 4 * widest) * item
    return share - parameters(shapes) * item - SEQUENCES * rows * LOGIT_BYTES - layers - FIXED_BYTES
