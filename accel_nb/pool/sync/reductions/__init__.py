"""Objects of particular kinds in a pickle stream."""
