"""Validated settings: one source of truth for flags, YAML and environment."""

from kvroute.config.clients import Log, Server, TimeoutSettings
from kvroute.config.engines import EndpointSettings, Health, SignalSettings
from kvroute.config.load import ConfigError, load
from kvroute.config.policies import Routing, SelectiveKv
from kvroute.config.reuse import Conversations, PrefillDecode, Tokenize, TokenizerSettings
from kvroute.config.section import Role
from kvroute.config.settings import Settings

__all__ = [
    "ConfigError",
    "Conversations",
    "EndpointSettings",
    "Health",
    "Log",
    "PrefillDecode",
    "Role",
    "Routing",
    "SelectiveKv",
    "Server",
    "Settings",
    "SignalSettings",
    "TimeoutSettings",
    "Tokenize",
    "TokenizerSettings",
    "load",
]
