"""Analysis of the source of cells: names, models and loops."""
