"""In vLLM's place under the engine's real worker: a model that says the prompt backwards, a token a step, and then ends.

What it does wrong lies as files in $STAND_IN: `fail` (it can't be set up), `hang` (a step never ends), `forget` (nothing of what it
was asked is answered), `die` (the process ends in a step), `wrong` (weights don't get in), `crowded` (it can't be set up beside
others). `gpu` makes it say that it has a GPU. It notes there each process with its GPUs, each swap, each emptying of the cache, and
which process is asked what.
"""

from types import SimpleNamespace

__version__ = "stand-in"
SamplingParams = SimpleNamespace
