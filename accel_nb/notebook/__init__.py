"""The notebook side: magics, session, what a cell uses, what its output looks like."""
