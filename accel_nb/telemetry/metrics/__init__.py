"""Metrics for monitoring systems, made in the main process of what the workers report: nothing runs in their steps."""

from accel_nb.telemetry.metrics.exporters import Exporters as Exporters
from accel_nb.telemetry.metrics.samples import METRICS as METRICS
from accel_nb.telemetry.metrics.samples import Metric as Metric
from accel_nb.telemetry.metrics.samples import Sample as Sample
from accel_nb.telemetry.metrics.samples import samples_of as samples_of
