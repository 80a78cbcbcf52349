"""KV on the move: transfer parameters per leg, prefill recipes, conversations and their handles."""
