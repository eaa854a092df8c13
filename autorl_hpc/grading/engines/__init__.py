"""Engines behind the Protocol of autorl_hpc.rollouts.engine.

Imports are lazy: the vLLM worker is in this package too, and its interpreter may lack pydantic.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datetime

    from autorl_hpc.records.experiment import GraderSpec
    from autorl_hpc.rollouts.engine import ServingEngine


def make_engine(spec: GraderSpec, base: Path, dtype: str, date: datetime.date) -> ServingEngine:
    """Start the engine that the experiment names, with the architecture and tokenizer of the model in `base`, whose template
    takes `date` for today.

    Raises:
        EngineFailed, AutorlError: it could not be started.
    """
    if spec.engine == "vllm":
        from autorl_hpc.grading.engines.vllm import VllmEngine

        return VllmEngine(base, spec, dtype, date=date)
    from autorl_hpc.grading.engines.transformers import TransformersEngine

    return TransformersEngine(base, spec, dtype, date=date)
