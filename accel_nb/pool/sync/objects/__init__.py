"""The parts of objects that both sides hold: their ids, memory, hooks and attributes."""
