"""What every type of device keeps to, over the CPU, a fake one and, where there is hardware, CUDA."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.accelerator.process.init_world import find_world
from accel_nb.accelerator.process.memory_release import free_cached_memory
from accel_nb.bigmodel.offload.weight_transfer import CudaCopyQueue
from accel_nb.bigmodel.planning.sizes import get_max_memory
from accel_nb.data.order import BatchShare
from accel_nb.data.prefetch import BatchPrefetcher, StreamTransfer
from accel_nb.precision.choice import choose_precision
from accel_nb.runtime import rng
from accel_nb.runtime.devices import registry
from accel_nb.runtime.devices.accelerator import GenericDevice
from accel_nb.runtime.devices.base import DeviceType
from accel_nb.runtime.devices.cuda import Cuda
from accel_nb.runtime.devices.registry import default_type, device_type, is_meta, type_of_backend
from accel_nb.runtime.distributed.current_world import current_comm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.world import World
from accel_nb.strategies.base import Capabilities
from accel_nb.telemetry.device_load import DeviceLoadMeter
from accel_nb.telemetry.events import Event
from accel_nb.telemetry.memory import MemoryMeter
from accel_nb.telemetry.step_meter import StepMeter
from tests.support.fake_device import FakeDevice

NAME = FakeDevice.name
HAS_GPU = torch.cuda.is_available()


class Sink:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Register the fake type as another package does: by an entry point."""
    point = EntryPoint(NAME, "tests.support.fake_device:FakeDevice", registry.GROUP)
    monkeypatch.setattr(registry, "_registered", lambda: {NAME: point})
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    found = device_type(f"{NAME}:0")
    assert isinstance(found, FakeDevice)
    return found


@pytest.fixture
def fake_cpu(fake: FakeDevice) -> FakeDevice:
    """Register the fake type in place of the CPU, so that code that computes with CPU tensors calls it."""
    fake.name = "cpu"
    registry._loaded["cpu"] = fake
    return fake


@pytest.fixture(
    params=[
        "cpu",
        "fake",
        pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="torch sees no CUDA device on this machine")),
    ]
)
def case(request: pytest.FixtureRequest) -> tuple[DeviceType, torch.device, str]:
    """Return a type, one of its devices, and where tensors of it are made."""
    if request.param == "fake":
        return request.getfixturevalue("fake"), torch.device(NAME, 0), "cpu"
    device = torch.device("cpu" if request.param == "cpu" else f"{request.param}:0")
    return device_type(device), device, str(device)


Case = tuple[DeviceType, torch.device, str]


def test_a_type_is_found_by_each_way_of_writing_a_device(case: Case) -> None:
    kind, device, _ = case
    assert device_type(device) is kind
    assert device_type(str(device)) is kind
    assert device_type(kind.name) is kind
    assert kind.name == device.type


def test_devices_are_counted_and_one_becomes_current(case: Case) -> None:
    kind, device, _ = case
    assert kind.is_available()
    assert kind.count() >= 1
    assert kind.make_current(device).type == kind.name
    assert isinstance(kind.why_unusable(), list)


def test_memory_adds_up(case: Case) -> None:
    kind, device, _ = case
    found = kind.memory(device)
    assert 0 <= found.allocated <= found.reserved
    assert 0 < found.free <= found.total
    peak = kind.peak_bytes(device)
    assert peak is None or peak >= 0
    assert not (found.is_of_process and kind.has_streams)
    assert isinstance(kind.shares_host_memory(device), bool)


def test_generator_states_go_round(case: Case) -> None:
    kind, device, where = case
    before = kind.get_rng_state(device)
    assert before.is_cpu
    first = torch.rand(3, device=where)
    kind.set_rng_state(before, device)
    assert torch.equal(torch.rand(3, device=where), first)


def test_precision_auto_follows_the_hardware(case: Case) -> None:
    kind, device, _ = case
    expected = "no" if kind.is_host else "bf16" if kind.has_real_bf16(device) else "fp16"
    assert choose_precision("auto", device) == expected


def test_streams_and_events_are_there_or_absent(case: Case) -> None:
    kind, device, where = case
    if not kind.has_streams:
        for request in (kind.new_stream, kind.current_stream, kind.on_stream):
            with pytest.raises(NotImplementedError, match=f"type {kind.name} has no streams"):
                request(device)
        with pytest.raises(NotImplementedError, match="no events"):
            kind.new_event()
        return
    stream = kind.new_stream(device)
    with kind.on_stream(stream):
        tensor = torch.ones(4, device=where)
        done = stream.record_event()
    current = kind.current_stream(device)
    current.wait_event(done)
    kind.record_use(tensor, current)
    event = kind.new_event()
    event.record()
    event.synchronize()
    assert event.query()
    current.synchronize()
    kind.synchronize(device)
    assert tensor.sum().item() == 4


def test_what_allocators_keep_can_be_seen_and_freed(case: Case) -> None:
    kind, device, _ = case
    kind.empty_cache()
    snapshot = kind.allocator_snapshot()
    assert (snapshot is None) == kind.is_host
    assert kind.compute_capability(device) is None or kind.name == "cuda"
    assert kind.device_name(device)


def test_a_launcher_limits_what_a_process_sees(case: Case) -> None:
    kind, _, _ = case
    variables = kind.visible_variables(0, 1)
    assert len(variables) == kind.one_per_worker
    assert all(name.endswith("VISIBLE_DEVICES") for name in variables)


def test_a_registered_type_is_the_default_and_a_rank_gets_its_own(fake: FakeDevice) -> None:
    if HAS_GPU:
        pytest.skip("CUDA comes before registered types")
    assert default_type() is fake
    assert find_world(False) == World(device=f"{NAME}:0")
    assert find_world(True) == World()
    assert type_of_backend("fakeccl") is fake
    assert type_of_backend("gloo").is_host


def test_a_rank_of_torchrun_keeps_its_device_once_the_group_is_open(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    if HAS_GPU:
        pytest.skip("CUDA comes before registered types")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    own = World(rank=1, size=2, local_rank=1, local_size=2, device=f"{NAME}:1")
    assert find_world(False) == own
    monkeypatch.setattr(DefaultGroup, "is_open", staticmethod(lambda: True))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: "fakeccl")
    assert find_world(False) == own
    assert find_world(True).device == "cpu"
    assert current_comm().world == own
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: "gloo")
    assert current_comm().world.device == "cpu"
    monkeypatch.setenv("_ACCEL_NB_WORKER_DEVICE", f"{NAME}:0")  # in a worker of the pool
    assert find_world(False).device == f"{NAME}:0"


def test_a_registered_type_runs_the_strategies_of_the_type_it_names(fake: FakeDevice) -> None:
    world = World(device=f"{NAME}:0")
    assert Capabilities().fits(world)
    reason = Capabilities(device_types=frozenset({"xla"})).reason_against(world)
    assert reason == f"it runs on xla, not on {NAME}"


def test_a_registered_type_is_planned_for_seeded_and_freed(fake: FakeDevice) -> None:
    if not HAS_GPU:
        assert list(get_max_memory()) == [0, 1, "cpu"]
    rng.set_seed(3)
    free_cached_memory()
    assert fake.calls["seed_beside_torch"] == fake.calls["empty_cache"] == 1


def test_a_name_that_is_not_registered_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_loaded", {})
    found = device_type("mtia:1")
    assert isinstance(found, GenericDevice)
    assert (found.name, found.has_streams, found.backend) == ("mtia", False, "gloo")
    assert found.is_available() == torch.mtia.is_available()
    assert device_type("meta").has_addresses
    assert not device_type("meta").is_available()
    assert is_meta(torch.device("meta"))


def test_rocm_is_cuda_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert Cuda().is_rocm
    assert Cuda().backend == "nccl"


def test_batches_are_copied_beside_the_computation(fake_cpu: FakeDevice) -> None:
    pairs: list[tuple[Any, BatchShare]] = [(torch.full((2,), float(n)), n) for n in range(3)]  # type: ignore[misc]
    lane = StreamTransfer(torch.device("cpu"), pins=False)
    found = [batch for batch, _ in BatchPrefetcher(iter(pairs), lane)]
    assert [batch[0].item() for batch in found] == [0.0, 1.0, 2.0]
    assert fake_cpu.calls["on_stream"] == fake_cpu.calls["record_use"] == 3
    assert fake_cpu.calls["wait_event"] == 2 * 3  # each stream waits for the other


def test_weights_are_copied_on_a_stream_of_their_own(fake_cpu: FakeDevice) -> None:
    queue = CudaCopyQueue(torch.device("cpu"))
    out = torch.zeros(4)
    queue.copy(torch.ones(4), out)
    mark = queue.record_copies()
    queue.compute_after(mark)
    queue.synchronize(mark)
    assert out.sum().item() == 4
    assert fake_cpu.calls["on_stream"] == fake_cpu.calls["wait_event"] == fake_cpu.calls["event.synchronize"] == 1


def test_losses_are_read_when_their_event_has_come(fake_cpu: FakeDevice) -> None:
    fake_cpu.are_events_late = True
    sink = Sink()
    meter = StepMeter(0, "cpu", sink)
    meter.add_loss(torch.tensor(2.0), 4, 4, is_first=True)
    meter.end_step(0.1, False)
    assert sink.events == []
    meter.flush()
    assert [event.loss for event in sink.events] == [2.0]
    assert fake_cpu.calls["record"] == fake_cpu.calls["event.synchronize"] == 1


def test_a_step_of_more_losses_than_slots_reports_the_mean_of_all(fake_cpu: FakeDevice) -> None:
    sink = Sink()
    meter = StepMeter(0, "cpu", sink)
    for _ in range(2):
        for number in range(3000):
            meter.add_loss(torch.tensor(float(number)), 2, 2, is_first=True)
        meter.end_step(0.1, False)
    meter.flush()
    assert [event.loss for event in sink.events] == pytest.approx([1499.5, 1499.5])


def test_memory_of_a_device_counts_all_that_is_not_known(fake_cpu: FakeDevice) -> None:
    sink = Sink()
    MemoryMeter(0, "cpu", sink).sample(0.0, 1, [nn.Linear(2, 2)], [])
    [found] = sink.events
    assert (found.parameters, found.other, found.cached, found.free) == (24, 76, 200, 1000)
    assert fake_cpu.calls["memory"] == 1


def test_a_loader_for_a_device_with_streams_copies_ahead(fake_cpu: FakeDevice) -> None:
    from accel_nb import Accelerator as Facade
    from accel_nb import DataLoaderConfiguration

    accelerator = Facade(cpu=True, dataloader_config=DataLoaderConfiguration(non_blocking=True))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2))
    assert len(list(loader)) == 2
    assert fake_cpu.calls["record_event"] >= 2


def test_sensors_are_read_at_most_once_a_second(fake: FakeDevice) -> None:
    sink = Sink()
    meter = DeviceLoadMeter(1, f"{NAME}:0", sink)
    for now in (10.0, 10.5, 11.0):
        meter.sample(now, 3)
    assert fake.calls["load"] == 2
    assert [(item.rank, item.step, item.name, item.value) for item in sink.events] == 2 * [
        (1, 3, "GPU utilization (%)", 90.0), (1, 3, "GPU power (W)", 300.0),
    ]  # fmt: skip


def test_a_sensor_that_a_gpu_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(device: object) -> float:
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 93)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 310_500)
    monkeypatch.setattr(torch.cuda, "temperature", absent)
    assert Cuda().load("cuda:0") == {"GPU utilization (%)": 93.0, "GPU power (W)": 310.5}
