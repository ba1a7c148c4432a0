"""Search for the fastest placement of Q/DQ pairs that is accurate enough."""
