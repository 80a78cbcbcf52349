"""The published cells of the selective KV policy on simulated engines: ``python -m bench.selective_cells``."""
