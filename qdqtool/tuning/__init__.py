"""Which sites of a network to leave float: the fastest placement that is accurate enough."""
