"""Engines behind the Protocol of autorl_hpc.rollouts.engine."""

from __future__ import annotations

from pathlib import Path

from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.rollouts.engine import Engine


def make_engine(spec: GraderSpec, base: Path, dtype: str) -> Engine:
    """The engine that the experiment asks for, holding the architecture and tokenizer of the model in `base`."""
    from autorl_hpc.grading.engines.transformers import TransformersEngine

    return TransformersEngine(
        base, dtype=dtype, device=spec.device, threads=spec.threads, batch_tokens=spec.batch_tokens
    )
