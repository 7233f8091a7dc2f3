"""Detection of what a plain cell trains: loops, models and their parts."""
