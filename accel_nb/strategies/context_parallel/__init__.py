"""Context parallelism: blocks of a model that several ranks compute for different parts of each sequence."""
