"""Device memory: maps of it, and reports when it has run out."""
