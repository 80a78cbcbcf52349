"""The engines: who they are, how they are, what they can do."""

from kvroute.fleet.endpoint import Capabilities, Endpoint, Leg
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.monitor import Monitor

__all__ = ["Capabilities", "Endpoint", "Fleet", "Leg", "Monitor"]
