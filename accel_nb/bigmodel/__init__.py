"""Models larger than the device: planned, loaded and run from wherever their weights fit."""
