"""The well-known properties and views of an accelerator, on one process."""

import copy
import pickle
from datetime import timedelta
from enum import Enum

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.options.plugins import AutocastKwargs, GradScalerKwargs, ProfileKwargs
from accel_nb.accelerator.process_state import AcceleratorState, DistributedType, PartialState
from accel_nb.errors import ConfigError, MisuseError


def test_a_process_alone_has_the_state_of_one():
    state = PartialState(cpu=True, timeout=timedelta(seconds=9))

    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert state.distributed_type is DistributedType.NO == "NO"
    assert not state.use_distributed
    assert (state.device, state.default_device, state.backend) == (torch.device("cpu"), torch.device("cpu"), None)
    with state.split_between_processes([1, 2, 3]) as part:
        assert part == [1, 2, 3]
    assert state.on_local_process(lambda: 1, local_process_index=0)() == 1
    assert state.on_local_process(local_process_index=1)(lambda: 1)() is None
    state.wait_for_everyone()
    state.destroy_process_group()


def test_states_of_two_accelerators_do_not_mix():
    one, other = Accelerator(cpu=True, mixed_precision="bf16"), Accelerator(cpu=True)

    assert (one.state.mixed_precision, other.state.mixed_precision) == ("bf16", "no")
    assert (one.native_amp, other.native_amp) == (True, False)
    assert AcceleratorState("bf16", cpu=True).mixed_precision == "bf16"
    assert AcceleratorState(Enum("Precision", {"HALF": "bf16"}).HALF, cpu=True).mixed_precision == "bf16"
    with pytest.raises(ConfigError, match=r"AcceleratorState\(\.\.\.\)"):
        AcceleratorState("bf17", cpu=True)
    assert AcceleratorState(cpu=True).mixed_precision == "no"


def test_a_gradient_state_follows_the_loop():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader, state = accelerator.prepare(DataLoader(range(5), batch_size=2)), accelerator.gradient_state
    seen = []
    for _ in loader:
        with accelerator.accumulate():
            seen.append((state.sync_gradients, state.end_of_dataloader, state.remainder, state.in_dataloader))
            steps = accelerator.step
    assert seen == [(False, False, -1, True), (True, False, -1, True), (True, True, 1, True)]
    assert steps == 0
    assert not state.in_dataloader
    assert (state.num_steps, state.sync_with_dataloader, state.adjust_scheduler) == (2, True, True)
    assert state.sync_each_batch is False


def test_the_scaler_is_pytorchs_own():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 8.0
    assert Accelerator(cpu=True).scaler is None


def test_autocast_can_be_switched_off_for_a_block():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    square = torch.ones(2, 2)
    with accelerator.autocast():
        assert (square @ square).dtype == torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (square @ square).dtype == torch.float32
        assert (square @ square).dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_unwrapping_gives_the_plain_class_and_training_goes_on(precision):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    accelerator.prepare(model, optimizer)

    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert type(plain) is nn.Linear
    assert list(plain.state_dict()) == ["weight", "bias"]
    assert plain.weight is model.weight
    assert type(copy.deepcopy(plain)) is type(pickle.loads(pickle.dumps(plain))) is nn.Linear
    before = plain.weight.detach().clone()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert not torch.equal(plain.weight, before)
    plain.eval()
    assert not model.training


def test_unwrapping_keeps_the_precision_by_default():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Sequential(nn.Linear(64, 1))
    accelerator.prepare(model)
    x = torch.rand(8, 64)

    expected = model(x)
    assert torch.equal(accelerator.unwrap_model(model)(x), expected)
    exact = accelerator.unwrap_model(model, keep_fp32_wrapper=False)(x)
    assert not torch.equal(exact, expected)
    assert torch.allclose(exact, expected, atol=0.05)


def test_unwrapping_keeps_a_forward_of_the_instance():
    model = nn.Linear(1, 1)
    model.forward = lambda x: x + 1  # type: ignore[method-assign]
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.prepare(model)
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False)(1) == 2
    assert accelerator.unwrap_model(model)(torch.ones(1)) == 2
    accelerator.close()
    assert model(1) == 2


def test_a_model_for_evaluation_gets_the_precision_only():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    teacher = nn.Sequential(nn.Linear(64, 1))
    exact = teacher(torch.ones(1, 64))
    accelerator.prepare_model(teacher, evaluation_mode=True)
    result = teacher(torch.full((1, 64), 1.0))
    assert result.dtype == torch.float32
    assert not torch.equal(result, exact)
    accelerator.close()
    assert type(teacher) is nn.Sequential
    assert torch.equal(teacher(torch.ones(1, 64)), exact)


def test_placement_is_given_for_each_object():
    accelerator = Accelerator(cpu=True, device_placement=False)
    with pytest.raises(MisuseError, match="given 2 objects and 1 values of device_placement"):
        accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1), device_placement=[True])
    there = nn.Linear(1, 1, device="meta")
    assert accelerator.prepare(there).weight.device.type == "meta"
    with pytest.raises(MisuseError, match="has no values"):
        accelerator.prepare(nn.Linear(1, 1, device="meta"), device_placement=[True])


def test_evenness_may_be_set_for_later_loaders():
    accelerator = Accelerator(cpu=True)
    assert not accelerator.even_batches
    accelerator.even_batches = True
    assert accelerator.even_batches
    with pytest.raises(MisuseError, match="even_batches is 1"):
        accelerator.even_batches = 1  # type: ignore[assignment]


def test_a_profile_handler_is_the_default_and_arguments_replace_its_fields(tmp_path):
    handler = ProfileKwargs(output_trace_dir=str(tmp_path / "a"), activities=["cpu"])
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    with accelerator.profile():
        torch.ones(3).sum()
    with accelerator.profile(tmp_path / "b"):
        torch.ones(3).sum()
    with accelerator.profile(ProfileKwargs(activities=["cpu"]), output_trace_dir=tmp_path / "c"):
        torch.ones(3).sum()
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == ["trace_rank0.json"] * 3


def test_a_spread_model_is_recognized():
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    assert not accelerator.verify_device_map(model)
    model.hf_device_map = {"a": 0, "b": "cpu"}  # type: ignore[assignment]
    assert accelerator.verify_device_map(model)


def test_a_custom_slicing_of_dispatched_batches_is_refused():
    with pytest.raises(MisuseError, match="slice_fn_for_dispatch"):
        Accelerator(cpu=True).prepare_data_loader(DataLoader(range(2)), slice_fn_for_dispatch=print)  # type: ignore[arg-type]
