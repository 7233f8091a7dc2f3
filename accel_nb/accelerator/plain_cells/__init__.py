"""Plain PyTorch cells: automatic preparation, and the checks that a cell trains as on one device."""
