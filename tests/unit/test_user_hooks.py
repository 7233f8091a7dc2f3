"""Hooks and replaced methods of optimizers, on both sides."""

import types
from typing import Any

import torch

from accel_nb.pool.sync.objects.module_hooks import module_hooks
from accel_nb.pool.sync.objects.user_hooks import changed_hooks, optimizer_hook_ids, own_methods, set_changed_hooks
from accel_nb.pool.sync.optimizer_states import optimizer_state, set_optimizer_state
from accel_nb.pool.sync.stream.pickling import dump, load


def sgd() -> Any:
    return torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)


def copied(value):
    return load(*dump(value, namespace={}, shared={}), namespace={})


def users(function):
    """Return a function as a notebook defines it."""
    function.__module__ = "__main__"
    return function


def test_hooks_are_set_in_the_dicts_that_handles_refer_to():
    own, other, calls = sgd(), sgd(), []
    other.register_step_post_hook(users(lambda *_: calls.append("first")))
    set_changed_hooks(own, changed_hooks(other, ()) or {})
    held, before = own._optimizer_step_post_hooks, optimizer_hook_ids(other)
    handle = other.register_step_post_hook(users(lambda *_: calls.append("second")))
    set_changed_hooks(own, changed_hooks(other, before) or {})
    own.step()
    assert own._optimizer_step_post_hooks is held
    assert calls == ["first", "second"]
    before = optimizer_hook_ids(other)
    handle.remove()
    set_changed_hooks(own, changed_hooks(other, before) or {})
    own.step()
    assert calls == ["first", "second", "first"]


def test_equal_hooks_are_no_change():
    optimizer = sgd()
    optimizer.register_step_pre_hook(users(lambda *_: None))
    assert changed_hooks(optimizer, optimizer_hook_ids(optimizer)) is None


def test_a_hook_from_another_process_keeps_its_number():
    optimizer = sgd()
    far = torch.utils.hooks.RemovableHandle.next_id + 100
    set_changed_hooks(optimizer, {"_optimizer_step_pre_hooks": {far: users(lambda *_: None)}})
    assert optimizer.register_step_pre_hook(users(lambda *_: None)).id > far


def test_a_handle_that_is_copied_with_its_optimizer_removes_the_copied_hook():
    optimizer = sgd()
    handle = optimizer.register_step_pre_hook(users(lambda *_: None))
    optimizer, handle = copied((optimizer, handle))
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    handle.remove()
    assert not optimizer._optimizer_step_pre_hooks


def test_reading_and_setting_a_state_runs_no_hooks_of_state_dicts():
    own, other, calls = sgd(), sgd(), []
    for optimizer in (own, other):
        optimizer.register_state_dict_pre_hook(users(lambda *_: calls.append("read")))
        optimizer.register_load_state_dict_post_hook(users(lambda *_: calls.append("set")))
    set_optimizer_state(own, optimizer_state(other, {}, {}, with_tensors=True))
    assert calls == []
    own.state_dict()
    assert calls == ["read"]


def counted(step, calls):
    def step_and_count(*args):
        calls.append(1)
        return step(*args)

    return users(step_and_count)


def test_a_replaced_step_is_copied_and_calls_the_copied_optimizer():
    optimizer = sgd()
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    assert own_methods(optimizer) == {}
    optimizer.step = counted(optimizer.step, calls := [])
    other, found = copied((optimizer, calls))
    parameter = other.param_groups[0]["params"][0]
    parameter.grad = torch.ones_like(parameter)
    before = parameter.detach().clone()
    other.step()
    assert (len(found), len(calls)) == (1, 0)
    assert torch.allclose(parameter, before - 0.1)


def test_a_step_that_a_schedule_has_wrapped_is_the_users():
    optimizer = sgd()
    step = users(lambda self, closure=None: None)
    optimizer.step = types.MethodType(step, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    assert own_methods(optimizer)["step"].__func__ is step


def test_a_method_of_a_built_in_type_is_a_users_hook():
    model, gradients = torch.nn.Linear(2, 1), []
    model.weight.register_hook(gradients.append)
    assert [hook for _, hook in module_hooks(model)] == [gradients.append]
    copy, received = copied((model, gradients))
    copy(torch.ones(1, 2)).sum().backward()
    assert len(received) == 1
    assert not gradients
