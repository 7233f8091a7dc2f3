"""Files that a plain cell reads and writes: each is written once."""
