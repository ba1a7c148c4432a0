"""Search for the fastest placement that is accurate enough (``qdqtool tune``).

A *placement* is the set of quantized inputs with their scales. A *site* is a set of nodes that are
quantized or left float together. A *choice* is an alternative for a site, such as float.
"""
