"""Simulated engines over HTTP and ZMQ, beside what a real vLLM 0.32.0 answered."""
