"""Option records under the names that users of `accelerate` know."""
