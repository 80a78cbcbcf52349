"""KV events of engines: what they publish about the blocks they cache, in order and without holes."""

from kvroute.fleet.events.listener import Listener

__all__ = ["Listener"]
