"""In vLLM's place under the engine's real worker: a model that says the prompt backwards, a token a step, and then ends.

What it does wrong lies as files in $STAND_IN: `fail` (it can't be set up), `hang` (a step never ends), `die` (the process ends in a
step), `wrong` (weights don't get in). It notes there each process with its GPUs, each swap, and each emptying of the cache.
"""

from types import SimpleNamespace

__version__ = "stand-in"
SamplingParams = SimpleNamespace
