"""Functions of the notebook, as workers receive them."""

from accel_nb.pool.sync import pickling

CELL = """
def outer(value):
    def inner():
        return 1 / value
    return inner
"""


def test_functions_keep_the_name_of_their_cell():
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile(CELL, "<cell 3>", "exec"), namespace)
    stream, buffers = pickling.dump(namespace["outer"], namespace=namespace, shared={})
    outer = pickling.load(stream, buffers, namespace={})
    assert outer.__code__.co_filename == outer(0).__code__.co_filename == "<cell 3>"
