"""Search for the fastest placement that is accurate enough (``qdqtool tune``).

A *placement* is the set of tensors with Q/DQ pairs, and their scales. A *site* is a set of nodes
that are quantized or left float together. A *choice* is an alternative for a site, such as float.
"""
