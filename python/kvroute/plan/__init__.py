"""A request and the state of the fleet make a plan; no I/O happens here."""
