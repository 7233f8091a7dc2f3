"""``accel-nb test``: whether training on this machine's own devices does what accel_nb promises.

`run` starts a pool as a notebook does and asks its workers for one check after another; `program` runs in the workers,
and `checks` are what it runs.
"""
