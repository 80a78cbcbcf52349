"""``kvroute demo``: the gateway on simulated engines, with a short script whose numbers are measured, not claimed."""
