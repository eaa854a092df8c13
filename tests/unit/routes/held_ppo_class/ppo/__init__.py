from .core import Critic, Losses
