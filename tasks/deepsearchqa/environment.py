"""DeepSearchQA's environment and dialogue. They lie in the package, since `deepsearchqa-mini` uses the same search.

A search back end of your own: `BACKENDS["name"] = make` here, and `search: name` in the recipe's options.
"""

from autorl_hpc.rollouts.search import Dialogue, Environment, goals

__all__ = ["Dialogue", "Environment", "goals"]
