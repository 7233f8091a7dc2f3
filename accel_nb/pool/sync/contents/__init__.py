"""The content of objects that are changed in place, and which objects these are."""
