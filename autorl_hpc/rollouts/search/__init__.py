"""Questions answered by searching: back ends, the environment, and the ReAct dialogue. No held-out data. For training,
`goals(data)` yields the training questions; see `autorl_hpc.rollouts.episodes.run_episodes`."""

from autorl_hpc.rollouts.search.search_environment import Dialogue, Environment, goals

__all__ = ["Dialogue", "Environment", "goals"]
