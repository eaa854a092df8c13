"""autorl-hpc: measures whether LLM agents can do RL post-training, as a batch suite for Slurm clusters."""

__version__ = "0.1.0"
