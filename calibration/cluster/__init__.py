"""Work on other machines through a Dask scheduler (extra ``cluster``).

``mapping`` opens a scheduler, sends pieces of work and gives each result back once, ``worker`` is what runs on the
workers, which have to be alike. Nothing here knows what the work is.
"""
