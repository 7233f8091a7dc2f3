"""The pickle streams in which values travel, and fingerprints of such streams."""
