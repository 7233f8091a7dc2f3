"""``accel-nb test``: checks of training on this machine's own devices.

`run` starts a pool as a notebook does and requests one check after another from its workers; `program` runs in the
workers and executes the functions of `checks`.
"""
