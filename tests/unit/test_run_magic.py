"""Scripts of ``%run`` in the source of a cell."""

from __future__ import annotations

from accel_nb.notebook.cells.run_magic import insert_scripts


def test_a_cell_without_scripts_keeps_every_character():
    source = 'text = """a\u2028b\x0cc\x85"""\nlast = 1'
    assert insert_scripts(source) == (source, 0)
