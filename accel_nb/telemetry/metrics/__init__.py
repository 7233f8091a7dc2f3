"""Metrics for monitoring systems, computed in the kernel from the workers' events, without cost for training steps."""

from accel_nb.telemetry.metrics.exporters import Exporters as Exporters
from accel_nb.telemetry.metrics.samples import METRICS as METRICS
from accel_nb.telemetry.metrics.samples import Metric as Metric
from accel_nb.telemetry.metrics.samples import Sample as Sample
from accel_nb.telemetry.metrics.samples import samples_of as samples_of
