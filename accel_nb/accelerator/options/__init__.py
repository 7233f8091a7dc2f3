"""Arguments and plugins with the names that `accelerate` has for them."""
