"""Whose tokens a decode engine's KV belongs to: digests of token prefixes, and what of a handle may be read.

Pure, and importable without the gateway's dependencies: the engine plugin, the gateway and the simulator share it.
"""
