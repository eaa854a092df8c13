"""WebShop in text (Yao et al. 2022, arXiv:2207.01206): catalogue, search, clickable pages, and a reward for the purchase.

Behaves like princeton-nlp/WebShop at 64fa2a5c with `observation_mode="text"`, without Java, spaCy or a web server. Holds no
held-out data (catalogue and goals come from the folder passed in), so agents may train with it:
`environment = Environment(Path("data"), held_out=False)`, `environment.reset(goal, seed=0)` with a row of goals.jsonl, then
`environment.step("search[red shoes]")`.
"""

from autorl_hpc.rollouts.webshop.shop_environment import Dialogue, Environment

__all__ = ["Dialogue", "Environment"]
