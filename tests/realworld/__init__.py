"""Loops and cells in the shapes that people write, run plainly and on workers, and what becomes of each."""
