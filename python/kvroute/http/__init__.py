"""The side that clients see: routes, keys, limits, errors, and the walk of a request through the gateway."""
