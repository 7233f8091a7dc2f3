"""Device memory: releasing it, mapping it, and reporting on it when it has run out."""
