"""Models whose repeated blocks are computed by different ranks, one stage after another."""
