"""Work on other machines through a Dask scheduler (extra ``cluster``).

``connection`` opens a scheduler and checks its workers (``facts``), ``mapping`` sends pieces of work and gives each
result back once, ``work`` is what runs on the workers. Nothing here knows what the work is.
"""
