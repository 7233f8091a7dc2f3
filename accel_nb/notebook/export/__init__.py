"""Export of a notebook to a script."""
