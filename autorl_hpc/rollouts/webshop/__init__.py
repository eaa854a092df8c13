"""WebShop in text (Yao et al. 2022, arXiv:2207.01206), like princeton-nlp/WebShop at 64fa2a5c with `observation_mode="text"`,
without Java, spaCy or a web server. Holds no held-out data, so agents may train with it."""

from autorl_hpc.rollouts.webshop.shop_environment import Dialogue, Environment

__all__ = ["Dialogue", "Environment"]
