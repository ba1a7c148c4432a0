"""Execution of functions on other machines through a Dask scheduler (extra ``cluster``).

`connection` connects to a scheduler. `jobs` sends items to workers, and returns each result once.
`worker` runs on the workers, and checks that they compute the same numbers as the client. The
package does not depend on the functions that the workers run.
"""
