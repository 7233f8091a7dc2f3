"""Metrics for monitoring systems, computed in the kernel from the workers' events, at no cost for training steps."""

from accel_nb.telemetry.metrics.exporters import Exporters
from accel_nb.telemetry.metrics.samples import METRICS, Metric, Sample, samples_of

__all__ = ["METRICS", "Exporters", "Metric", "Sample", "samples_of"]
