"""WebShop in text (Yao et al. 2022, arXiv:2207.01206): a catalogue, a search, pages to click through, a reward at the purchase.

Behaves as princeton-nlp/WebShop at 64fa2a5c with `observation_mode="text"`, without Java, spaCy or a web server. Nothing held
out lies here: catalogue and goals come from the folder that an environment is made with, so agents may train with it:

    environment = Environment(Path("data"), held_out=False)
    first = environment.reset(goal, seed=0)     # a row of goals.jsonl
    step = environment.step("search[red shoes]")
"""

from autorl_hpc.rollouts.webshop.shop_environment import Dialogue, Environment

__all__ = ["Dialogue", "Environment"]
