"""Telemetry of a run: events, the ring buffer that transfers them, and the meters that emit them."""
