"""Option records with the names that `accelerate` has for them."""
