"""What the routing policies are worth on simulated engines: ``python -m bench.routing``."""
