"""The notebook's side: magics, session, analysis of cells, and their output."""
