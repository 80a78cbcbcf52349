"""The engines: who they are, how they are, what they can do."""

from kvroute.fleet.endpoint import Capabilities, Declared, Endpoint, KvLayout
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.flights import Leg
from kvroute.fleet.monitor import Monitor
from kvroute.fleet.scrape import Scraper
from kvroute.fleet.signals import Signals

__all__ = [
    "Capabilities",
    "Declared",
    "Endpoint",
    "Fleet",
    "KvLayout",
    "Leg",
    "Monitor",
    "Scraper",
    "Signals",
]
