"""Workers on several nodes, each of which runs the local engine."""
