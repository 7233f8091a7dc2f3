"""The proof that a loss is a sum over samples, from its autograd graph."""
