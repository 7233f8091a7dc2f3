"""Random notebook sessions: many cells in one notebook, some of them on workers."""
