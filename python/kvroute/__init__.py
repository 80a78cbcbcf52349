"""kvroute: an OpenAI-compatible gateway for vLLM that decides which KV cache is reused, from where, and whether moving it is worth it."""

from importlib.metadata import version as _version

__version__ = _version("kvroute")

__all__ = ["__version__"]
