"""Strategies: ways in which the ranks of a world train one model together."""

from accel_nb.strategies.base import Bundle, Capabilities, Strategy
from accel_nb.strategies.choice import choose
from accel_nb.strategies.registry import Registry

__all__ = ["Bundle", "Capabilities", "Registry", "Strategy", "choose"]
