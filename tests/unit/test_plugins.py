"""Options under well-known names."""

import inspect
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook
from torch.utils.data import DataLoader

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.options.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel_nb.config import Layer, using_layers
from accel_nb.config.sections import DataOptions
from accel_nb.errors import ConfigError, MisuseError


def test_each_field_of_the_plugin_is_an_option_of_the_schema():
    record = DataLoaderConfiguration(True, True, True, True, 7, True)

    options = record.as_options()

    assert options.pop("batch") == "global"
    # How streams resume is ours alone.
    assert {name.removeprefix("data.") for name in options} == set(DataOptions.model_fields) - {"resume_stream"}
    assert DataLoaderConfiguration(split_batches=False).as_options() == {"batch": "per-worker"}
    assert DataLoaderConfiguration().as_options() == {}


def test_a_plugin_sets_options_and_says_where_they_came_from():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=True, data_seed=3))

    data = accelerator.resolved.config.data
    assert (data.even_batches, data.data_seed) == (True, 3)
    assert accelerator.resolved.origins["data.even_batches"].source == "DataLoaderConfiguration(...)"
    assert any("data.use_seedable_sampler is off" in note for note in accelerator.resolved.notes)


def test_what_the_plugin_leaves_out_stays_as_the_options_of_the_run_say():
    with using_layers([Layer("flags", {"data": {"even_batches": True}}, "the magic")]):
        assert Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration()).resolved.config.data.even_batches


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"batch": "global"}, ["Accelerator(...)", "batch"]),
        ({"config": {"batch": "global"}}, ["Accelerator(config=...)", "batch"]),
        ({"config": {"data": {"even_batches": False}}}, ["Accelerator(config=...)", "data.even_batches"]),
    ],
)
def test_a_plugin_and_arguments_that_disagree_are_an_error_that_names_both(given, names):
    record = DataLoaderConfiguration(split_batches=False, even_batches=True)
    with pytest.raises(ConfigError) as raised:
        Accelerator(cpu=True, dataloader_config=record, **given)

    for name in [*names, "DataLoaderConfiguration(...)", "disagree"]:
        assert name in str(raised.value)


@pytest.mark.parametrize("values", [{"data_seed": -1}, {"even_batches": "maybe"}, {"dispatch_batches": 2}])
def test_a_value_that_cannot_be_is_refused_by_name(values):
    with pytest.raises(ConfigError, match=f"data.{next(iter(values))}.*is not allowed"):
        Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**values))


def test_copying_ahead_to_a_cpu_is_said_to_have_no_effect():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(non_blocking=True))
    accelerator.prepare(DataLoader(range(3)))

    assert any("non_blocking has no effect" in note for note in accelerator.describe()["notes"])


def test_well_known_plugins_are_views_of_the_schema():
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(4, sync_with_dataloader=False, sync_each_batch=True),
        dynamo_plugin=TorchDynamoPlugin("EAGER", dynamic=True, use_regional_compilation=False),
        kwargs_handlers=[
            AutocastKwargs(cache_enabled=False),
            GradScalerKwargs(init_scale=2.0),
            InitProcessGroupKwargs(timeout=timedelta(minutes=2), init_method="env://"),
            DistributedDataParallelKwargs(
                bucket_cap_mb=5,
                comm_hook=DDPCommunicationHookType.POWER_SGD,
                comm_state_option={"matrix_approximation_rank": 3},
            ),
            ProfileKwargs(record_shapes=True),
        ],
    )

    config = accelerator.resolved.config
    assert (config.accumulate, config.accumulation.tail, config.accumulation.sync_each_batch) == (4, "carry", True)
    assert (config.compile.backend, config.compile.dynamic, config.compile.regional) == ("eager", "yes", False)
    assert (config.autocast.cache_enabled, config.scaler.init_scale, config.group.timeout) == (False, 2.0, 120.0)
    assert (config.ddp.bucket_cap_mb, config.ddp.comm_hook, config.ddp.power_sgd_rank) == (5, "power_sgd", 3)
    assert str(accelerator.resolved.origins["ddp.comm_hook"]) == "DistributedDataParallelKwargs(...) (code)"


def test_every_option_of_power_sgd_has_its_torch_name():
    state = torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState
    names = {
        "matrix_approximation_rank": 2, "start_powerSGD_iter": 5, "min_compression_rate": 3.0,
        "use_error_feedback": False, "warm_start": False, "random_seed": 1,
    }  # fmt: skip
    assert names.keys() <= inspect.signature(state).parameters.keys()
    Accelerator(
        cpu=True,
        kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option=names)],
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs(enabled=False)]}, "two AutocastKwargs.*enabled=False"),
        ({"kwargs_handlers": [3]}, "has a int; it may have AORecipeKwargs"),
        ({"kwargs_handlers": [3, 3]}, "has a int; it may have AORecipeKwargs"),
        ({"split_batches": "global"}, "split_batches='global' was given .* must be True or False"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(4)},
            r"accumulate: 2 from Accelerator\(...\) and 4 from GradientAccumulationPlugin\(...\) disagree",
        ),
        (
            {"dynamo_backend": "inductor", "dynamo_plugin": TorchDynamoPlugin("eager")},
            "compile.backend: 'inductor' .* 'eager'",
        ),
        ({"split_batches": True, "batch": "per-worker"}, "split_batches='global' disagree"),
        ({"project_dir": "a", "project_config": ProjectConfiguration("b")}, "project_dir='a' and .*'b' disagree"),
        (
            {"step_scheduler_with_optimizer": True, "config": {"schedule": "calls"}},
            "step_scheduler_with_optimizer=True .* schedule=calls .*disagree",
        ),
        ({"gradient_accumulation_plugin": GradientAccumulationPlugin(2, False)}, "adjust_scheduler=False"),
        ({"kwargs_handlers": [InitProcessGroupKwargs(init_method="tcp://h:1")]}, "init_method='tcp://h:1'.*env://"),
        ({"kwargs_handlers": [InitProcessGroupKwargs(backend="mpi")]}, "group.backend: mpi .* is not allowed"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(dim=1)]}, "dim=1 .* first dim"),
        (
            {"kwargs_handlers": [DistributedDataParallelKwargs(comm_state_option={"rank": 1})]},
            "comm_state_option 'rank' .* matrix_approximation_rank",
        ),
        (
            {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BATCHED_POWER_SGD)]},
            "batched_power_sgd .*not supported",
        ),
        ({"dynamo_plugin": TorchDynamoPlugin("eager", options={"a": 1})}, "options from TorchDynamoPlugin"),
        ({"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True)}, "use_stateful_dataloader=True"),
        (
            {"megatron_lm_plugin": object(), "torch_tp_plugin": object()},
            "megatron_lm_plugin was given .*\n?.*torch_tp_plugin was given",
        ),
    ],
)
def test_what_disagrees_or_is_not_served_is_an_error_that_names_it(arguments, words):
    with pytest.raises(ConfigError) as raised:
        Accelerator(cpu=True, **arguments)
    assert re.search(words, str(raised.value), re.DOTALL), str(raised.value)


def test_later_arguments_that_are_none_are_accepted():
    Accelerator(cpu=True, log_with=None, fsdp_plugin=None, deepspeed_plugin=None, rng_types=["generator"])


def test_rng_types_that_there_are_not_are_refused():
    with pytest.raises(MisuseError, match="no random states called xla"):
        Accelerator(cpu=True, rng_types=["torch", "xla"])


def test_step_scheduler_with_optimizer_off_counts_calls():
    assert Accelerator(cpu=True, step_scheduler_with_optimizer=False).resolved.config.schedule == "calls"


def test_folders_of_the_project_are_reported():
    named = ProjectConfiguration("runs", automatic_checkpoint_naming=True, total_limit=3)
    checkpoint = Accelerator(cpu=True, project_config=named).resolved.config.checkpoint
    assert (checkpoint.dir, checkpoint.total_limit) == ("runs/checkpoints", 3)
    with pytest.raises(ConfigError, match="needs project_dir"):
        Accelerator(cpu=True, project_config=ProjectConfiguration(automatic_checkpoint_naming=True))
    accelerator = Accelerator(cpu=True, project_dir="runs", project_config=ProjectConfiguration(logging_dir="logs"))
    assert (accelerator.project_dir, accelerator.logging_dir) == ("runs", "logs")
    assert Accelerator(cpu=True, project_dir="runs").logging_dir == "runs"
