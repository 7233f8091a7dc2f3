"""Ranks come from the helper of `tests.ranks`."""

from tests.ranks.conftest import rank_launcher

__all__ = ["rank_launcher"]
