"""Values logged by a run, and metrics gathered from all ranks."""
