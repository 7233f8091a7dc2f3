"""Detection of the objects and loops that a plain cell trains."""
