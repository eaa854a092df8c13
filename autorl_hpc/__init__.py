"""autorl-hpc: measures whether LLM agents can do RL post-training, as a batch suite for Slurm clusters."""

from __future__ import annotations

from typing import Any

__version__ = "0.2.0"


def load(*paths: Any) -> Any:
    """Return all runs below `paths` as pandas frames: `autorl_hpc_frames.load`, an extension that ships with the package."""
    from autorl_hpc_frames import load as frames

    return frames(*paths)
