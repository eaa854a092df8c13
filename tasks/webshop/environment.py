"""WebShop's environment and dialogue. They lie in the package, since `webshop-mini` uses the same."""

from autorl_hpc.rollouts.webshop import Dialogue, Environment

__all__ = ["Dialogue", "Environment"]
