"""Checks, for each plan, whether its strategy refuses a model. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from accel_nb.config.schema import Config
from accel_nb.forecast.plans import Forecast, Plan
from accel_nb.precision.half import FullPrecision
from accel_nb.strategies.base import Bundle
from accel_nb.strategies.choice import with_options
from accel_nb.strategies.registry import StrategyRegistry


def check_refusals(
    found: Forecast,
    models: Iterable[nn.Module],
    optimizers: Iterable[Optimizer],
    config: Config,
    registry: StrategyRegistry | None = None,
) -> Forecast:
    """Return the forecast; plans whose strategy refuses to prepare these objects together have the reason."""
    bundle, registry = Bundle(tuple(models), tuple(optimizers)), registry or StrategyRegistry()
    plans = (
        replace(plan, refusal=plan.refusal or _find_refusal(plan, bundle, config, registry)) for plan in found.plans
    )
    return replace(found, plans=tuple(plans))


def _find_refusal(plan: Plan, bundle: Bundle, config: Config, registry: StrategyRegistry) -> str | None:
    if not plan.is_supported or plan.layout.options["strategy"] not in registry.names:
        return None
    config = with_options(config, plan.options)
    refused = registry.get(config.strategy)(getattr(config, config.strategy, None), FullPrecision()).refusal(bundle)
    return None if refused is None else refused.reason
