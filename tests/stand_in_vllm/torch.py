"""In torch's place, for the engine's worker on top of the stand-in of vLLM."""

__version__ = "stand-in"
