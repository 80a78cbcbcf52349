"""Conversations that change as clients change them: every text equal to a cold run, and how much KV was reused.

One seeded generator (`conversation`, `shapes`) makes the requests; a `Bench` answers them: the gateway before simulated
or real engines, or, for comparison, simple rules without verification (`baselines`). ``python -m tests.reuse`` is the
whole run.
"""
