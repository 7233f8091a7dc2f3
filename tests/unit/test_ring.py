import os
import sys

import torch

from accel_nb.telemetry.events import MemorySample, MetricLogged, StepDone
from accel_nb.telemetry.ring import RingReader, RingWriter, create_ring
from accel_nb.telemetry.step_meter import StepMeter


def step(number: int) -> StepDone:
    return StepDone(3, number, 1.5, 0.25, 1e-3, 0.01, 32, number % 2 == 0)


def test_events_come_out_as_they_went_in():
    descriptor = create_ring(8)
    writer, reader = RingWriter(descriptor), RingReader(descriptor)
    memory = MemorySample(3, 2, 4.0, 1, 2, 3, 4, 5, 2**40)
    writer.write(step(1))
    writer.write(memory)
    assert reader.read() == [step(1), memory]
    assert reader.read() == []
    writer.close()
    reader.close()


def test_logged_values_take_the_ring_if_their_names_fit():
    descriptor = create_ring(8)
    writer, reader = RingWriter(descriptor), RingReader(descriptor)
    fitting = [MetricLogged(3, 2**40, 1.5, name, 0.25) for name in ("loss", "", "größe", "x" * 56)]
    for event in fitting:
        assert writer.can_write(event)
        writer.write(event)
    assert reader.read() == fitting
    assert writer.write_metric(3, 1, 1.5, "half \ud83d", 0.25)
    assert [event.name for event in reader.read()] == ["half \\ud83d"]
    for name in ("x" * 57, "ö" * 29, "ends\0"):
        assert not writer.can_write(MetricLogged(3, 1, 1.5, name, 0.25))
        assert not writer.write_metric(3, 1, 1.5, name, 0.25)
    assert reader.read() == []
    writer.close()
    reader.close()


def test_a_slow_reader_loses_the_oldest_and_counts_them():
    descriptor = create_ring(8)
    writer, reader = RingWriter(descriptor), RingReader(descriptor)
    for number in range(20):
        writer.write(step(number))
    assert [event.step for event in reader.read()] == list(range(12, 20))
    assert reader.num_missed == 12
    writer.close()
    reader.close()


def test_records_outlive_their_writer():
    descriptor = create_ring(8)
    pid = os.fork()
    if pid == 0:
        RingWriter(descriptor).write(step(7))
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    reader = RingReader(descriptor)
    assert [event.step for event in reader.read()] == [7]
    reader.close()


def test_a_second_writer_goes_on_where_the_first_ended():
    descriptor = create_ring(8)
    for number in (1, 2):
        writer = RingWriter(descriptor)
        writer.write(step(number))
        writer.close()
    reader = RingReader(descriptor)
    assert [event.step for event in reader.read()] == [1, 2]
    reader.close()


class RingSink:
    """Writes steps into a ring, as a worker does."""

    def __init__(self, writer: RingWriter) -> None:
        self.emit, self.emit_step, self.emit_metric = writer.write, writer.write_step, writer.write_metric


def test_the_curves_of_two_optimizers_of_one_long_variable_have_different_names():
    descriptor = create_ring(8)
    writer, reader = RingWriter(descriptor), RingReader(descriptor)
    meter, optimizers = StepMeter(0, "cpu", RingSink(writer)), [torch.nn.Identity(), torch.nn.Identity()]
    потери_генератора = torch.ones(())
    for optimizer in optimizers:
        meter.name_loss(sys._getframe(), потери_генератора)
        meter.add_loss(потери_генератора, 1, 1, is_first=True)
        meter.end_step(0.1, False, optimizer)
    assert [event.curve for event in reader.read()] == ["потери_ген", "потери_ген (2)"]
    writer.close()
    reader.close()
