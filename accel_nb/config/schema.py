"""Every option of accel_nb, declared once: type, limits, unit, help line and default.

Flags, environment variables, the YAML file, the sidebar's form, the TypeScript types and ``docs/options.md`` are all
derived from the models below. To add an option, add a field; to add a strategy's options, add a section to
``StrategySections`` and run ``python -m accel_nb.config.export``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from keyword import iskeyword
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter
from pydantic.fields import FieldInfo

SCHEMA_VERSION = 1
MAX_WORKERS = 1024
MAX_SEED = 2**63 - 1
MONTH_S = 30 * 24 * 3600

PLANNED_VALUES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ddp.comm_hook": (
            "batched_power_sgd",
        ),  # PyTorch's own fails in its first compressed step, up to 2.13 at least
        # To disk: DeepSpeed's operator for it is compiled with libaio where it runs.
        "deepspeed.offload_optimizer": ("nvme",),
        "deepspeed.offload_parameters": ("nvme",),
    }
)
"""Values of served options that this version refuses by name."""

_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")
_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DURATION = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+) ?(s|min|h|d)")
_ADDRESS = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_URL = re.compile(r"https?://[!-~]+")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


# Flags and environment variables bring text, files and code bring values. Each reader below turns text into a value
# and leaves anything else alone, so that the strict types behind them decide (True is not 1, 4.0 is not 4).
def _read_text(value: object) -> object:
    return None if value == "none" else value


def _read_whole(value: object) -> object:
    if isinstance(value, str):
        value = value.strip()
        return int(value) if _WHOLE.fullmatch(value) else _read_text(value)
    return value


def _read_real(value: object) -> object:
    if isinstance(value, str):
        value = value.strip()
        return float(value) if _REAL.fullmatch(value) else _read_text(value)
    return value


def _read_switch(value: object) -> object:
    return _SWITCH.get(value.strip().lower(), value) if isinstance(value, str) else value


def _read_names(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",")) if value.strip() else ()
    return value


def _read_parts(value: object) -> object:
    return _read_names(_read_text(value))


def _read_ranks(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, str):
        value = value.strip()
        if value in ("all", "none"):
            return _read_text(value)
        value = _read_names(value)
    return tuple(_read_whole(item) for item in value) if isinstance(value, tuple | list) else value


def _unique(value: tuple[Any, ...] | str | None) -> tuple[Any, ...] | str | None:
    return tuple(dict.fromkeys(value)) if isinstance(value, tuple) else value


def _run_name(value: str | None) -> str | None:
    if value is None:
        return None
    if not value.isprintable() or value != value.strip() or set(value) & set("/\\") or value in (".", ".."):
        raise ValueError("not a run name")
    return value


def _duration(value: int | str | None) -> int | str | None:
    if isinstance(value, str) and not 0 < seconds_of(value) <= MONTH_S:
        raise ValueError("not a duration")
    return value


def seconds_of(duration: str) -> float:
    """Return how long a duration such as ``30s``, ``10min``, ``1.5h`` or ``2d`` is; raises ValueError for no such."""
    found = _DURATION.fullmatch(duration.strip())
    if found is None:
        raise ValueError("not a duration")
    return float(found[1]) * _SECONDS[found[2]]


def bytes_of(size: str) -> int:
    """Return ``80GiB`` (2^30) or ``80GB`` (10^9) in bytes; raises ValueError for no such size."""
    found = int(TypeAdapter(ByteSize).validate_python(size))
    if not 0 < found < 2**63:
        raise ValueError("not a size")
    return found


def _size(value: str | None) -> str | None:
    if value is not None:
        bytes_of(value)
    return value


def _plain_path(value: str | None) -> str | None:
    if value is not None and not value.isprintable():
        raise ValueError("not a path")
    return value


def _module_name(value: str) -> str:
    if not all(part.isidentifier() or part.isdecimal() for part in value.split(".")):
        raise ValueError("not a module's name")
    return value


def _address(value: str | None) -> str | None:
    if value is not None and not _ADDRESS.fullmatch(value):
        raise ValueError("not HOST:PORT")
    return value


def _url(value: str | None) -> str | None:
    if value is not None and not _URL.fullmatch(value):
        raise ValueError("not a URL")
    return value


def _identifier(value: str) -> str:
    if not value.isidentifier() or iskeyword(value):
        raise ValueError("not a Python name")
    return value


Whole = Annotated[int, Field(strict=True)]
Workers = Annotated[int, Field(strict=True, ge=1, le=MAX_WORKERS)]
Rank = Annotated[int, Field(strict=True, ge=0, lt=MAX_WORKERS)]
Ranks = Annotated[tuple[Rank, ...], Field(min_length=1)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Switch = Annotated[bool, BeforeValidator(_read_switch), Field(strict=True)]
Name = Annotated[str, AfterValidator(_identifier), Field(strict=True, max_length=256)]
ModuleName = Annotated[str, AfterValidator(_module_name), Field(strict=True, max_length=256)]


def _option(default: Any, description: str, *, unit: str | None = None, **extra: Any) -> Any:
    """Declare an option; ``extra`` may hold ``flag``, ``metavar``, ``allowed``, ``scope`` and JSON Schema keywords.

    The scope ``cell`` is that of options which change nothing about the training.
    """
    return Field(default, description=description, json_schema_extra={"unit": unit, **extra})


class Section(BaseModel):
    """A frozen group of options; a name that is not declared is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, validate_default=False)


class SingleOptions(Section):
    """Options of the strategy for one process; it has none."""


class DdpOptions(Section):
    """Options of PyTorch's DistributedDataParallel, with PyTorch's own names and defaults."""

    find_unused_parameters: Switch = _option(
        False,
        "Look in every backward pass for parameters that took no part; slower. Switched on by itself when the first "
        "step finds such parameters; needed from the start only if later steps leave others out.",
    )
    bucket_cap_mb: Annotated[Annotated[Whole, Field(ge=1, le=65536)], BeforeValidator(_read_whole)] = _option(
        25, "Size of the gradient buckets that are reduced together.", unit="MiB"
    )
    static_graph: Switch = _option(False, "Promise that every step uses the same parameters in the same order.")
    broadcast_buffers: Switch = _option(
        True, "Copy rank 0's buffers (such as batch-norm statistics) to every rank before each forward pass."
    )
    comm_hook: Literal["no", "fp16", "bf16", "power_sgd"] = _option(
        "no", "Compress gradients on their way between workers: to 16 bits, or to a product of low rank."
    )
    comm_wrapper: Literal["no", "fp16", "bf16"] = _option(
        "no", "Number format around the comm hook: what it sends is cast to it as well."
    )
    power_sgd_rank: Annotated[Annotated[Whole, Field(ge=1, le=65536)], BeforeValidator(_read_whole)] = _option(
        1, "Rank of the matrices that PowerSGD sends: larger is more exact and more to send."
    )
    power_sgd_start: Annotated[Annotated[Whole, Field(ge=2, le=MAX_SEED)], BeforeValidator(_read_whole)] = _option(
        1000, "First step in which PowerSGD compresses; until then gradients are averaged as they are.", unit="steps"
    )
    power_sgd_min_compression: Annotated[Annotated[Real, Field(gt=0)], BeforeValidator(_read_real)] = _option(
        2.0, "Compress only tensors that PowerSGD makes smaller by at least this factor.", unit="times"
    )
    power_sgd_error_feedback: Switch = _option(
        True, "Add to each step's gradients what PowerSGD lost in the step before; takes a gradient's worth of memory."
    )
    power_sgd_warm_start: Switch = _option(True, "Start PowerSGD's search from the matrices of the step before.")
    power_sgd_seed: Annotated[Annotated[Whole, Field(ge=0, le=2**32 - 1)], BeforeValidator(_read_whole)] = _option(
        0, "Seed of the matrices that PowerSGD starts from."
    )


class FsdpOptions(Section):
    """Options of PyTorch's fully_shard: each worker holds a part of the model."""

    wrap: Annotated[Literal["blocks", "size", "classes", "model"], BeforeValidator(_read_text)] = _option(
        "blocks",
        "What is gathered, computed and let go of at a time: repeated blocks of the model, modules of min_params "
        "parameters, modules of the given classes, or the model as a whole.",
    )
    min_params: Annotated[Annotated[Whole, Field(ge=1, le=MAX_SEED)], BeforeValidator(_read_whole)] = _option(
        1_000_000, "How many parameters a module has that is gathered by size.", unit="parameters"
    )
    classes: Annotated[tuple[Name, ...], BeforeValidator(_read_names), AfterValidator(_unique)] = _option(
        (),
        "Class names of the modules that are gathered at a time.",
        metavar="NAMES",
        allowed="class names, separated by commas",
    )
    reshard_after_forward: Switch = _option(
        True, "Let go of parameters between forward and backward, and gather them again: less memory, more traffic."
    )
    hybrid_shard_size: Annotated[Workers | None, BeforeValidator(_read_whole)] = _option(
        None,
        "How many workers share one copy of the model, such as those of one machine; none given: all.",
        unit="workers",
    )
    cpu_offload: Switch = _option(False, "Keep parameters, gradients and optimizer state in host memory.")
    autocast: Switch = _option(
        False,
        "Choose the number format for each operation, as on one device; else bf16 and fp16 are gathered and computed "
        "in throughout, which is half the traffic. Either way weights are kept and stepped as they are.",
    )
    reduce_dtype: Literal["fp32", "compute"] = _option(
        "fp32", "What gradients of half precision are averaged in: float32, or the format of the computation."
    )
    float8_gather: Switch = _option(
        False,
        "Gather the weights of the layers that multiply in fp8 in float8, which is half the traffic of bf16; recipe "
        "tensorwise.",
    )
    average_unused: Switch = _option(
        False,
        "Count a parameter that took no part on a worker as a zero gradient there: needed when workers use different "
        "parameters in one step.",
    )
    weights: Annotated[
        Annotated[str, Field(strict=True, min_length=1, max_length=4096)] | None,
        BeforeValidator(_read_text),
        AfterValidator(_plain_path),
    ] = _option(
        None,
        "Safetensors that models built without memory (torch.device('meta'), init_empty_weights) are filled from: each "
        "worker reads its part only.",
        metavar="PATH",
        allowed="the path of a safetensors file, of an index of several, or of their folder, or none",
    )
    forward_methods: Annotated[tuple[Name, ...], BeforeValidator(_read_names), AfterValidator(_unique)] = _option(
        (),
        "Methods other than forward that compute with the model's parameters, such as encode.",
        metavar="NAMES",
        allowed="names of methods, separated by commas",
    )


class DeepspeedOptions(Section):
    """Options of DeepSpeed's ZeRO: each worker holds a part of the training's state."""

    zero_stage: Annotated[Literal[1, 2, 3], BeforeValidator(_read_whole)] = _option(
        2,
        "What is divided among the workers: 1 optimizer state, 2 gradients too, 3 parameters too.",
        flag="zero-stage",
    )
    offload_optimizer: Annotated[Literal["no", "cpu"], BeforeValidator(_read_text)] = _option(
        "no", "Keep optimizer state, and step, in host memory."
    )
    offload_parameters: Annotated[Literal["no", "cpu"], BeforeValidator(_read_text)] = _option(
        "no", "Keep divided parameters in host memory; stage 3."
    )
    bucket_size: Annotated[Annotated[Whole, Field(ge=2, le=MAX_SEED)], BeforeValidator(_read_whole)] = _option(
        500_000_000, "How much is averaged, or gathered, in one message; at most the model.", unit="elements"
    )
    prefetch_size: Annotated[Annotated[Whole, Field(ge=0, le=MAX_SEED)], BeforeValidator(_read_whole)] = _option(
        50_000_000, "How much is gathered ahead of the module that needs it; stage 3.", unit="elements"
    )
    persistent_size: Annotated[Annotated[Whole, Field(ge=0, le=MAX_SEED)], BeforeValidator(_read_whole)] = _option(
        100_000, "Parameters of at most this size stay whole on each worker between steps; stage 3.", unit="elements"
    )
    overlap_comm: Switch = _option(False, "Average gradients while others are computed; stages 2 and 3, on GPUs.")
    weights: Annotated[
        Annotated[str, Field(strict=True, min_length=1, max_length=4096)] | None,
        BeforeValidator(_read_text),
        AfterValidator(_plain_path),
    ] = _option(
        None,
        "Safetensors that models built without memory (torch.device('meta'), init_empty_weights) are filled from, each "
        "worker reading its part only; stage 3.",
        metavar="PATH",
        allowed="the path of a safetensors file, of an index of several, or of their folder, or none",
    )
    allow_untested_optimizer: Switch = _option(
        False,
        "Take an optimizer that is not known to treat each element of a parameter by itself, as it must: parameters "
        "are cut anywhere.",
    )


class XlaOptions(Section):
    """Options of training by PyTorch/XLA."""

    shard_params: Switch = _option(
        False,
        "Divide parameters, gradients and optimizer state among the chips of a worker as well, not the batch alone.",
    )


class AccumulationOptions(Section):
    """What becomes of accumulation windows; how many batches one has is the option ``accumulate``."""

    tail: Literal["step", "carry", "drop"] = _option(
        "step",
        "What a window becomes that the end of the loader cuts short: step takes an optimizer step of it, carry goes "
        "on with it in the next epoch, drop throws its gradients away.",
    )
    sync_each_batch: Switch = _option(
        False,
        "Average gradients over ranks after every batch instead of once a window: more traffic, less memory where "
        "gradients are sharded.",
    )


class AutocastOptions(Section):
    """Options of torch.autocast."""

    enabled: Switch = _option(True, "Compute in the run's precision; off leaves autocast to the cell.")
    cache_enabled: Switch = _option(True, "Keep the low precision copies of weights within one autocast region.")


class ScalerOptions(Section):
    """Options of the loss scaling of fp16, with PyTorch's own names and defaults."""

    init_scale: Annotated[Annotated[Real, Field(gt=0)], BeforeValidator(_read_real)] = _option(
        65536.0, "What losses are multiplied by at first."
    )
    growth_factor: Annotated[Annotated[Real, Field(gt=1)], BeforeValidator(_read_real)] = _option(
        2.0, "What the scale is multiplied by after a while without overflow."
    )
    backoff_factor: Annotated[Annotated[Real, Field(gt=0, lt=1)], BeforeValidator(_read_real)] = _option(
        0.5, "What the scale is multiplied by when gradients overflow."
    )
    growth_interval: Annotated[Annotated[Whole, Field(ge=1, le=1_000_000_000)], BeforeValidator(_read_whole)] = _option(
        2000, "How long a while is.", unit="steps"
    )
    enabled: Switch = _option(True, "Scale losses in fp16; off lets small gradients vanish.")


class Fp8Options(Section):
    """Options of 8-bit floating point (precision fp8), by torchao."""

    recipe: Annotated[Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"], BeforeValidator(_read_text)] = _option(
        "tensorwise",
        "What shares a scale: a tensor, which is fastest, or each row, which is more exact; the last computes the "
        "gradients of weights in bf16.",
    )
    emulate: Switch = _option(
        False, "Round to float8 and multiply in float32, on hardware without float8: slow, to see how a model trains."
    )
    skip_modules: Annotated[tuple[ModuleName, ...] | None, BeforeValidator(_read_parts), AfterValidator(_unique)] = (
        _option(
            None,
            "Names, or parts of names between dots, of layers that stay in bf16; none given: the first and the last "
            "linear layer.",
            metavar="NAMES",
            allowed="names of modules such as head or blocks.0, separated by commas, or none",
        )
    )
    trial_rows: Annotated[Annotated[Whole, Field(ge=0, le=1_000_000)], BeforeValidator(_read_whole)] = _option(
        0,
        "Before training, time the layers in fp8 and in bf16 on this many rows (tokens of a batch), and say which is "
        "faster; 0: do not.",
        unit="rows",
    )


class GroupOptions(Section):
    """Options of the process group, where this process opens it itself (under torchrun)."""

    backend: Annotated[Literal["auto", "gloo", "nccl"], BeforeValidator(_read_text)] = _option(
        "auto", "What carries messages between ranks; auto is nccl for CUDA devices and gloo for the rest."
    )
    timeout: Annotated[Annotated[Real, Field(gt=0, le=MONTH_S)], BeforeValidator(_read_real)] = _option(
        1800.0, "How long a rank waits for the others before it gives up.", unit="seconds", metavar="SECONDS"
    )


class CompileOptions(Section):
    """Options of torch.compile for prepared models."""

    backend: Annotated[Annotated[str, Field(strict=True, min_length=1, max_length=64)], BeforeValidator(_read_text)] = (
        _option(
            "no",
            "Compile models with this backend, such as inductor; no compiles nothing.",
            metavar="BACKEND",
            allowed="no, inductor, or another backend that torch.compile knows",
        )
    )
    mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"], BeforeValidator(_read_text)
    ] = _option("default", "How much time compiling may take for faster code.")
    fullgraph: Switch = _option(False, "Refuse models that cannot be compiled as one graph.")
    dynamic: Annotated[Literal["auto", "yes", "no"], BeforeValidator(_read_text)] = _option(
        "auto", "Compile for shapes that vary; auto does so when it meets the second shape."
    )
    regional: Switch = _option(
        True, "Compile repeated blocks of a model, each kind once, instead of the whole: starts many times faster."
    )


class DataOptions(Section):
    """Options of how loaders are read."""

    dispatch_batches: Annotated[Switch | None, BeforeValidator(_read_text)] = _option(
        None,
        "Let rank 0 alone read, and send each rank its share; none given: for streams (iterable datasets that cannot "
        "divide themselves) whose batches are each worker's. Otherwise each rank reads for itself.",
        metavar="true|false",
    )
    even_batches: Switch = _option(
        False,
        "Let every rank take equally many samples, and repeat some from the start of the epoch where they run short; "
        "else shares may differ by one sample, are weighted, and no sample is repeated.",
    )
    use_seedable_sampler: Switch = _option(
        False, "Shuffle in an order that depends on data_seed and the epoch only, not on the state of a generator."
    )
    data_seed: Annotated[Annotated[Whole, Field(ge=0, le=MAX_SEED)] | None, BeforeValidator(_read_whole)] = _option(
        None, "Seed of use_seedable_sampler; none given: seed, else that of rank 0's generator.", metavar="S"
    )
    resume_stream: Annotated[Literal["refuse", "replay"], BeforeValidator(_read_text)] = _option(
        "refuse",
        "What going on in the middle of an epoch does with a stream that has no state_dict to say where it was: refuse "
        "to load, or read what was trained on again and drop it.",
    )
    non_blocking: Annotated[Switch | None, BeforeValidator(_read_text)] = _option(
        None,
        "Copy the next batch to a GPU while the present one is trained on; none given: where the loader pins memory "
        "and reads in processes of its own, since else the next batch is read ahead of its time in this process.",
        metavar="true|false",
    )


class StrategySections(Section):
    """One section for each strategy; the names of the fields are the names of the strategies."""

    single: SingleOptions = Field(default_factory=SingleOptions, description="One process, one device; no options.")
    ddp: DdpOptions = Field(
        default_factory=DdpOptions, description="PyTorch DistributedDataParallel: one model replica per rank."
    )
    fsdp: FsdpOptions = Field(
        default_factory=FsdpOptions, description="PyTorch fully_shard (FSDP2): a part of the model on each rank."
    )
    deepspeed: DeepspeedOptions = Field(
        default_factory=DeepspeedOptions, description="DeepSpeed ZeRO: a part of the training's state on each rank."
    )
    xla: XlaOptions = Field(
        default_factory=XlaOptions, description="PyTorch/XLA: each worker drives all chips that it sees."
    )


class CheckpointOptions(Section):
    """Where checkpoints go and how many stay."""

    dir: Annotated[
        Annotated[str, Field(strict=True, min_length=1, max_length=4096)] | None,
        BeforeValidator(_read_text),
        AfterValidator(_plain_path),
    ] = _option(
        None,
        "Folder or URL of the checkpoints; those that are saved without a name of their own are called step_N.",
        metavar="DIR",
        allowed="the path of a folder, a URL such as s3://bucket/run, or none",
        flag="checkpoint",
    )
    every: Annotated[
        Annotated[Whole, Field(ge=1, le=1_000_000_000)] | Annotated[str, Field(strict=True, max_length=32)] | None,
        BeforeValidator(_read_whole),
        AfterValidator(_duration),
    ] = _option(
        None,
        "Save a checkpoint each time so many optimizer steps, or so much time, has passed, in the background between "
        "two steps.",
        flag="every",
        metavar="N|10min",
        allowed="a whole number of steps, a duration such as 30s, 10min, 1.5h or 1d (up to 30d), or none",
    )
    resume: Annotated[
        Annotated[str, Field(strict=True, min_length=1, max_length=4096)] | None,
        BeforeValidator(_read_text),
        AfterValidator(_plain_path),
    ] = _option(
        None,
        "Go on from a checkpoint: auto takes the newest complete one of checkpoint.dir if there is one, a path that "
        "one. Loops over epochs that are finished pass empty.",
        flag="resume",
        metavar="auto|PATH",
        allowed="auto, the path or URL of a checkpoint or of a folder of checkpoints, or none",
    )
    total_limit: Annotated[Annotated[Whole, Field(ge=1, le=1_000_000)] | None, BeforeValidator(_read_whole)] = _option(
        None,
        "Keep at most this many of a run's step_N; older ones are removed once a new one is complete. None given: all.",
        unit="checkpoints",
    )


class MetricsOptions(Section):
    """Where a monitoring system finds the numbers of a run; all off by default, made in the notebook's process."""

    port: Annotated[Annotated[Whole, Field(ge=0, le=65535)] | None, BeforeValidator(_read_whole)] = _option(
        None,
        "Serve metrics for Prometheus at http://127.0.0.1:PORT/metrics, to this machine only; 0 takes a free port.",
        metavar="PORT",
        scope="cell",
    )
    textfile: Annotated[
        Annotated[str, Field(strict=True, min_length=1, max_length=4096)] | None,
        BeforeValidator(_read_text),
        AfterValidator(_plain_path),
    ] = _option(
        None,
        "Write metrics for the textfile collector of Prometheus' node exporter; a name that ends in .prom.",
        metavar="FILE",
        allowed="the path of a file, or none",
        scope="cell",
    )
    statsd: Annotated[
        Annotated[str, Field(strict=True, max_length=256)] | None, BeforeValidator(_read_text), AfterValidator(_address)
    ] = _option(
        None,
        "Send metrics to StatsD, or to Datadog's agent.",
        metavar="HOST:PORT",
        allowed="a host and a port, such as 127.0.0.1:8125, or none",
        scope="cell",
    )
    statsd_tags: Switch = _option(
        True, "Say ranks as Datadog's tags; off makes them parts of the names, as plain StatsD needs it.", scope="cell"
    )
    otlp: Annotated[
        Annotated[str, Field(strict=True, max_length=2048)] | None, BeforeValidator(_read_text), AfterValidator(_url)
    ] = _option(
        None,
        "Send metrics to a collector of OpenTelemetry, by OTLP over HTTP.",
        metavar="URL",
        allowed="a URL such as http://127.0.0.1:4318/v1/metrics, or none",
        scope="cell",
    )


STRATEGIES = ("auto", *StrategySections.model_fields)
"""What ``strategy`` may be, beside what other packages have installed."""

STRATEGY_GROUP = "accel_nb.strategies"
"""The entry points under which strategies are installed."""


def _strategy(value: str) -> str:
    if value not in STRATEGIES and value not in entry_points(group=STRATEGY_GROUP).names:
        raise ValueError("not a strategy")
    return value


class Config(StrategySections):
    """All options of a run, each within its own limits.

    ``resolve`` builds it from layers and checks what must hold between options; a Config that is built by hand is
    checked field by field only.
    """

    checkpoint: CheckpointOptions = Field(
        default_factory=CheckpointOptions, description="Where checkpoints go and how many stay."
    )
    gpus: Annotated[Workers | Literal["all"] | None, BeforeValidator(_read_whole)] = _option(
        None, "Run on this many GPUs, one worker each; none given: every visible one, else one CPU worker.", unit="GPUs"
    )
    cpus: Annotated[Annotated[int, Field(strict=True, ge=1, le=256)] | None, BeforeValidator(_read_whole)] = _option(
        None, "Run on this many CPU workers instead of on accelerators.", unit="workers"
    )
    tpus: Annotated[Workers | Literal["all"] | None, BeforeValidator(_read_whole)] = _option(
        None,
        "Run on the TPU, where one worker drives all chips: all, or as many as there are. None given: where there is "
        "a TPU and no GPU.",
        unit="chips",
    )
    precision: Literal["no", "fp16", "bf16", "fp8", "auto"] = _option(
        "no",
        "Number format of the forward and backward pass; auto takes the best of the others than fp8 that the device "
        "really has.",
    )
    strategy: Annotated[str, Field(strict=True), AfterValidator(_strategy)] = _option(
        "auto",
        "How the workers share the training. auto chooses by worker count and devices, and for models that could be "
        "too large by a forecast of the memory; where auto was asked for it is always made, and what cannot fit is "
        "refused.",
        enum=list(STRATEGIES),
    )
    memory: Annotated[
        Annotated[str, Field(strict=True, max_length=32)] | None, BeforeValidator(_read_text), AfterValidator(_size)
    ] = _option(
        None,
        "How much each device may hold, for the plan of strategy auto; none given: what is free on it.",
        metavar="SIZE",
        allowed="a size such as 80GiB (2^30 bytes) or 24GB (10^9), or none",
    )
    accumulate: Annotated[Annotated[Whole, Field(ge=1, le=1_000_000)], BeforeValidator(_read_whole)] = _option(
        1, "Batches whose gradients are summed up before one optimizer step.", unit="batches"
    )
    accumulation: AccumulationOptions = Field(
        default_factory=AccumulationOptions, description="What becomes of accumulation windows."
    )
    schedule: Annotated[Literal["steps", "samples", "calls"], BeforeValidator(_read_text)] = _option(
        "steps",
        "What a call of scheduler.step() advances: one optimizer step, as many as there are ranks (for schedules that "
        "were computed for one process), or one call whatever the optimizer does.",
    )
    autocast: AutocastOptions = Field(default_factory=AutocastOptions, description="Options of torch.autocast.")
    scaler: ScalerOptions = Field(default_factory=ScalerOptions, description="Loss scaling of fp16.")
    fp8: Fp8Options = Field(default_factory=Fp8Options, description="8-bit floating point.")
    activation_checkpointing: Switch = _option(
        False,
        "Compute the activations of repeated blocks again in the backward pass instead of keeping them: less memory, "
        "about a third more computing.",
    )
    compile: CompileOptions = Field(default_factory=CompileOptions, description="torch.compile for prepared models.")
    group: GroupOptions = Field(default_factory=GroupOptions, description="The process group under torchrun.")
    sentinels: Switch = _option(
        True,
        "Check the first optimizer step: that parameters moved, that ranks agree, that the learning rate is the "
        "planned one, and stop at a loss that is NaN.",
    )
    clip: Annotated[Annotated[Real, Field(gt=0)] | None, BeforeValidator(_read_real)] = _option(
        None, "Clip the gradients to this total norm before each optimizer step.", unit="norm", metavar="NORM"
    )
    seed: Annotated[Annotated[Whole, Field(ge=0, le=MAX_SEED)] | None, BeforeValidator(_read_whole)] = _option(
        None, "Seed of Python, NumPy and PyTorch in every worker.", metavar="S"
    )
    batch: Annotated[Literal["per-worker", "global"] | None, BeforeValidator(_read_text)] = _option(
        None,
        "What the loader's batch size means: each worker's batch, or the batch of all workers together; none given: "
        "global for a plain cell, per-worker for a cell that uses the accelerator.",
    )
    name: Annotated[
        Annotated[str, Field(strict=True, min_length=1, max_length=64)] | None,
        BeforeValidator(_read_text),
        AfterValidator(_run_name),
    ] = _option(
        None,
        "Name of the run, as trackers and the sidebar show it.",
        metavar="RUN",
        allowed="1 to 64 printable characters without / and \\, or none",
        scope="cell",
    )
    prepare: Switch = _option(
        True, "Prepare the models, optimizers and loaders of a plain cell automatically.", scope="cell"
    )
    pull: Annotated[tuple[Name, ...], BeforeValidator(_read_names), AfterValidator(_unique)] = _option(
        (),
        "Names to bring back to the notebook although they are large.",
        metavar="NAMES",
        allowed="Python names, separated by commas",
        scope="cell",
    )
    bring_back: Switch = _option(
        True,
        "Bring the names that the cell binds and the weights that it trains back to the notebook.",
        flag="return",
        scope="cell",
    )
    show_ranks: Annotated[Literal["all"] | tuple[Rank, ...], BeforeValidator(_read_ranks), AfterValidator(_unique)] = (
        _option(
            (),
            "Ranks whose output is shown unfolded besides rank 0's; none given: rank 0 only.",
            unit="ranks",
            scope="cell",
        )
    )
    ranks: Annotated[Ranks | None, BeforeValidator(_read_ranks), AfterValidator(_unique)] = _option(
        None, "Run the cell on these ranks only; none given: on all.", unit="ranks", scope="cell"
    )
    static: Switch = _option(False, "Draw the panel as a picture instead of a live widget.", scope="cell")
    panel: Switch = _option(True, "Show the panel with loss and memory below the cell.", scope="cell")
    background: Switch = _option(
        False,
        "Return at once, while the cell runs; what it binds and trains comes back when it has ended.",
        scope="cell",
    )
    dry_run: Switch = _option(False, "Print the plan and start nothing.", scope="cell")
    timeout: Annotated[Annotated[Real, Field(gt=0, le=MONTH_S)] | None, BeforeValidator(_read_real)] = _option(
        None, "Stop the cell when it runs longer than this.", unit="seconds", metavar="SECONDS", scope="cell"
    )
    max_restarts: Annotated[Annotated[Whole, Field(ge=0, le=1000)], BeforeValidator(_read_whole)] = _option(
        0,
        "Run a cell whose worker dies or raises again, so often at most, on fresh workers: from the newest checkpoint "
        "if there is a folder for them, else from the start.",
        unit="restarts",
        metavar="N",
        scope="cell",
    )
    debug: Switch = _option(
        False,
        "Before each exchange between workers make sure that all of them make the same one, with tensors that fit, and "
        "name the worker that differs; slower.",
    )
    config: Annotated[
        Annotated[str, Field(strict=True, min_length=1, max_length=4096)] | None,
        BeforeValidator(_read_text),
        AfterValidator(_plain_path),
    ] = _option(
        None,
        "YAML file with options; everything else overrides it.",
        metavar="FILE",
        allowed="the path of a YAML file, or none",
        scope="cell",
    )
    data: DataOptions = Field(default_factory=DataOptions, description="How loaders are read.")
    metrics: MetricsOptions = Field(
        default_factory=MetricsOptions, description="Numbers of a run for monitoring systems."
    )


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf of the schema: its dotted name and all that is known about it."""

    name: str
    field: FieldInfo

    @property
    def section(self) -> str | None:
        """The section that the option stands in, such as a strategy's; None at the root."""
        return self.name.rpartition(".")[0] or None

    @property
    def extra(self) -> Mapping[str, Any]:
        """The machine-readable facts beside the type: unit, flag, metavar, allowed."""
        extra = self.field.json_schema_extra
        return extra if isinstance(extra, dict) else {}

    @property
    def flag(self) -> str:
        """The flag's name without dashes in front."""
        return self.extra.get("flag", self.name.replace("_", "-"))

    @property
    def variable(self) -> str:
        """The environment variable that sets the option."""
        return "ACCEL_NB_" + self.name.upper().replace(".", "__")

    @property
    def is_of_training(self) -> bool:
        """Whether the option changes how a cell trains, and not just how it is run and shown."""
        return self.extra.get("scope") != "cell"

    @property
    def default(self) -> Any:
        """The value when no layer gives one."""
        return self.field.default

    @property
    def is_switch(self) -> bool:
        """Whether the option is on or off."""
        return self.field.annotation is bool

    @property
    def allowed(self) -> str:
        """What may be given, in words."""
        return _in_words(self._json_schema)

    @property
    def metavar(self) -> str:
        """What stands for the value in the usage text; empty for a switch."""
        return "" if self.is_switch else self.extra.get("metavar") or _metavar(self._json_schema)

    @property
    def _json_schema(self) -> Mapping[str, Any]:
        schema = json_schema()
        section, _, leaf = self.name.rpartition(".")
        if section:
            schema = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]]
        return schema["properties"][leaf]


def _leaves(model: type[Section], prefix: str = "") -> dict[str, Option]:
    leaves: dict[str, Option] = {}
    sections: dict[str, Option] = {}
    for name, field in model.model_fields.items():
        if is_section(field):
            sections.update(_leaves(field.annotation, f"{prefix}{name}."))  # pyright: ignore[reportArgumentType]
        else:
            leaves[prefix + name] = Option(prefix + name, field)
    return leaves | sections


def is_section(field: FieldInfo) -> bool:
    """Whether the field is a group of options rather than an option."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


OPTIONS: Mapping[str, Option] = MappingProxyType(_leaves(Config))
"""Every option by its dotted name, root options first."""

SECTIONS = tuple(name for name, field in Config.model_fields.items() if is_section(field))
"""The names of the groups of options."""


@cache
def json_schema() -> Mapping[str, Any]:
    """Return the JSON Schema (draft 2020-12) of all options, with units."""
    schema = Config.model_json_schema()
    return MappingProxyType({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})


def _in_words(node: Mapping[str, Any]) -> str:
    if "allowed" in node:
        return node["allowed"]
    if "anyOf" in node:
        return _either([_in_words(part) for part in node["anyOf"]])
    if "enum" in node:
        return _either([str(choice) for choice in node["enum"]])
    if "const" in node:
        return str(node["const"])
    kind = node.get("type")
    if kind == "array":
        return f"a comma list in which each is {_in_words(node['items'])}"
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _limits(node)
    return {"boolean": "true or false", "null": "none"}.get(str(kind), "text")


def _either(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} or {parts[-1]}" if len(parts) > 1 else parts[0]


def _limits(node: Mapping[str, Any]) -> str:
    above, low, below, high = (node.get(key) for key in ("exclusiveMinimum", "minimum", "exclusiveMaximum", "maximum"))
    if node.get("type") == "integer":
        low = above + 1 if above is not None else low
        high = below - 1 if below is not None else high
        return f" from {low} to {high}"
    parts = [f" {word} {limit}" for word, limit in (("above", above), ("up to", high)) if limit is not None]
    return " and".join(parts)


def _metavar(node: Mapping[str, Any]) -> str:
    parts = [part for part in node.get("anyOf", [node]) if part.get("type") != "null"]
    if any("enum" in part or "const" in part for part in parts) or len(parts) > 1:
        return "|".join(_metavar_of(part) for part in parts)
    return _metavar_of(parts[0])


def _metavar_of(part: Mapping[str, Any]) -> str:
    if "enum" in part:
        return "|".join(map(str, part["enum"]))
    if "const" in part:
        return str(part["const"])
    return {"integer": "N", "number": "X", "array": "LIST"}.get(str(part.get("type")), "TEXT")


@dataclass(frozen=True, slots=True)
class Clash:
    """Options that are each allowed and cannot stand together; ``message`` says why and what to do."""

    options: tuple[str, ...]
    message: str


ALTERNATIVES = (("gpus", "cpus"), ("gpus", "tpus"), ("cpus", "tpus"))
"""Options of which a run has at most one: the one from the higher layer sets the other aside."""


def clashes(config: Config) -> list[Clash]:
    """Return what must hold between options and does not."""
    found = [
        Clash((first, second), "only one of the two can be given; remove one")
        for first, second in ALTERNATIVES
        if getattr(config, first) is not None and getattr(config, second) is not None
    ]
    if not config.bring_back and config.pull:
        found.append(Clash(("pull", "bring_back"), "nothing comes back, so no names can be pulled; remove one"))
    if config.background and config.max_restarts:
        found.append(
            Clash(("background", "max_restarts"), "a run in the background is not started again; remove one of the two")
        )
    if config.fsdp.wrap == "classes" and not config.fsdp.classes:
        found.append(Clash(("fsdp.wrap",), "there are no classes to go by; name some with fsdp.classes"))
    if config.fsdp.float8_gather and config.precision == "fp8" and config.fp8.recipe != "tensorwise":
        message = f"{config.fp8.recipe} scales a weight in two ways, which needs all of it unrounded: use tensorwise"
        found.append(Clash(("fp8.recipe", "fsdp.float8_gather"), message))
    if config.fsdp.float8_gather and config.fsdp.cpu_offload:
        message = "what lies in host memory is gathered in the format of the computation; remove one of the two"
        found.append(Clash(("fsdp.float8_gather", "fsdp.cpu_offload"), message))
    if config.checkpoint.dir is None and config.checkpoint.every is not None:
        found.append(
            Clash(("checkpoint.every",), "it has no folder to save to; give one with --checkpoint DIR (checkpoint.dir)")
        )
    if config.checkpoint.dir is None and config.checkpoint.resume == "auto":
        found.append(
            Clash(
                ("checkpoint.resume",),
                "auto looks in checkpoint.dir, which is not set; give it with --checkpoint DIR, or name a checkpoint",
            )
        )
    size_from = "cpus" if config.gpus is None else "gpus"
    size = getattr(config, size_from)
    if isinstance(size, int) and (config.gpus is None or config.cpus is None):
        found += [Clash((option, size_from), message) for option, message in rank_problems(config, size).items()]
    return found


def rank_problems(config: Config, size: int) -> dict[str, str]:
    """Return a message for each option that names a rank outside of a world of ``size``."""
    problems: dict[str, str] = {}
    for option in ("ranks", "show_ranks"):
        value = getattr(config, option)
        outside = [rank for rank in value if rank >= size] if isinstance(value, tuple) else []
        if outside:
            listed = ", ".join(map(str, outside))
            problems[option] = f"rank {listed} is outside of a world of {size}; ranks go from 0 to {size - 1}"
    return problems


def idle_options(config: Config, given: Mapping[str, Any]) -> dict[str, str]:
    """Return, for each given option that has no effect in this config, the reason."""
    idle = {
        name: f"it belongs to {option.section}, and strategy is {config.strategy}"
        for name in given
        if (option := OPTIONS[name]).section in StrategySections.model_fields
        and config.strategy not in ("auto", option.section)
    }
    hook = config.ddp.comm_hook
    for name, needed in (("min_params", "size"), ("classes", "classes")):
        if f"fsdp.{name}" in given and config.fsdp.wrap != needed:
            idle.setdefault(f"fsdp.{name}", f"fsdp.wrap is {config.fsdp.wrap}")
    for name in ("offload_parameters", "prefetch_size", "persistent_size", "weights"):
        if f"deepspeed.{name}" in given and config.deepspeed.zero_stage < 3:
            idle.setdefault(f"deepspeed.{name}", f"deepspeed.zero_stage is {config.deepspeed.zero_stage}")
    for name in given:
        if name == "ddp.comm_wrapper" and hook == "no" and config.ddp.comm_wrapper != "no":
            idle.setdefault(name, "it goes around ddp.comm_hook, which is no")
        if name.startswith("ddp.power_sgd_") and hook != "power_sgd":
            idle.setdefault(name, f"ddp.comm_hook is {hook}")
    if config.memory is not None and config.strategy != "auto" and "memory" in given:
        idle["memory"] = f"nothing is planned, since strategy is {config.strategy}"
    for name in given:
        if (name.startswith("fp8.") or name == "fsdp.float8_gather") and config.precision != "fp8":
            idle[name] = f"precision is {config.precision}"
    if config.static and not config.panel and "static" in given:
        idle["static"] = "the panel is off"
    if "data.data_seed" in given and not config.data.use_seedable_sampler:
        idle["data.data_seed"] = "data.use_seedable_sampler is off"
    if config.checkpoint.dir is None and "checkpoint.total_limit" in given:
        idle["checkpoint.total_limit"] = "checkpoint.dir is not set, so nothing is named step_N"
    return idle
