"""Real engines: how to install, start and question them, and the tests that need them (``make engine-test``)."""
