"""Validated settings: one source of truth for flags, YAML and environment."""

from kvroute.config.load import ConfigError, load
from kvroute.config.settings import (
    Conversations,
    EndpointSettings,
    Health,
    Log,
    PrefillDecode,
    Role,
    Routing,
    SelectiveKv,
    Server,
    Settings,
    SignalSettings,
    TimeoutSettings,
    Tokenize,
    TokenizerSettings,
)

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
