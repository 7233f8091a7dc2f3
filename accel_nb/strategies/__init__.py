"""Strategies: ways in which the ranks of a world train one model together."""

from accel_nb.strategies.base import Bundle as Bundle
from accel_nb.strategies.base import Capabilities as Capabilities
from accel_nb.strategies.base import Strategy as Strategy
from accel_nb.strategies.choice import choose as choose
from accel_nb.strategies.registry import StrategyRegistry as StrategyRegistry
