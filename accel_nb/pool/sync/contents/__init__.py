"""What the content of an object is, and how it is read and set in place."""
