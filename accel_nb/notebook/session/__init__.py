"""A session: workers, running cells, and the state that kernel and workers share."""
