"""Work on other machines through a Dask scheduler (extra ``cluster``).

`connection` opens a scheduler. `jobs` sends pieces of work and gives each result once. `worker`
runs on the workers, which have to be alike. Nothing here depends on the kind of work.
"""
