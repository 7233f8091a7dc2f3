"""The parts of objects that kernel and workers share: their ids, memory, hooks and attributes."""
