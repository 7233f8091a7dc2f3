"""Metrics for monitoring systems, computed in the kernel from the workers' events, without cost for training steps."""

from accel_nb.telemetry.metrics.exporters import Exporters as Exporters
from accel_nb.telemetry.metrics.metric_values import METRICS as METRICS
from accel_nb.telemetry.metrics.metric_values import Metric as Metric
from accel_nb.telemetry.metrics.metric_values import MetricValue as MetricValue
from accel_nb.telemetry.metrics.metric_values import metric_values as metric_values
