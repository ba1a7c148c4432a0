"""Search for the fastest placement that is accurate enough (``qdqtool tune``).

A *placement* says which inputs are quantized, with which scales. A *site* is a set of nodes that
are quantized or left float together; a *choice* is an alternative for a site, such as float.
"""
