"""An OpenAI-compatible gateway for vLLM: which KV cache is reused, from where, and is moving it worth it?"""

from importlib.metadata import version as _version

__version__ = _version("kvroute")

__all__ = ["__version__"]
