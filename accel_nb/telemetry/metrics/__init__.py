"""Metrics for monitoring systems, made in the main process of what the workers report: nothing runs in their steps."""

from accel_nb.telemetry.metrics.exporters import Exporters
from accel_nb.telemetry.metrics.samples import METRICS, Metric, Sample, samples_of

__all__ = ["METRICS", "Exporters", "Metric", "Sample", "samples_of"]
