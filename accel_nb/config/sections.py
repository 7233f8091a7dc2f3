"""The groups of options: one for each strategy, and groups for data, checkpoints, number formats and monitoring."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from accel_nb.config.value_types import (
    MAX_SEED,
    MONTH_S,
    Float,
    Int,
    ModuleName,
    Name,
    PathText,
    Switch,
    Workers,
    as_address,
    as_duration,
    as_url,
    read_float,
    read_int,
    read_names,
    read_parts,
    read_seconds,
    read_text,
    without_duplicates,
)


def declare(default: Any, description: str, *, unit: str | None = None, **extra: Any) -> Any:
    """Declare an option; ``extra`` may contain ``flag``, ``metavar``, ``allowed``, ``scope`` and JSON Schema keywords.

    Options that do not change the training have the scope ``cell``.
    """
    return Field(default, description=description, json_schema_extra={"unit": unit, **extra})


class Section(BaseModel):
    """A frozen group of options; undeclared names are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, validate_default=False)


class SingleOptions(Section):
    """Options of the strategy for one process; it has none."""


class DdpOptions(Section):
    """Options of PyTorch's DistributedDataParallel, with PyTorch's own names and defaults."""

    find_unused_parameters: Switch = declare(
        False,
        "Search for unused parameters in every backward pass; slower. Enabled automatically if the first step has "
        "unused parameters; needed from the start only if later steps leave out other ones.",
    )
    bucket_cap_mb: Annotated[Annotated[Int, Field(ge=1, le=65536)], BeforeValidator(read_int)] = declare(
        25, "Size of gradient buckets, each of which is reduced in one operation.", unit="MiB"
    )
    static_graph: Switch = declare(False, "Promise that every step uses the same parameters in the same order.")
    broadcast_buffers: Switch = declare(
        True, "Copy rank 0's buffers (such as batch-norm statistics) to every rank before each forward pass."
    )
    comm_hook: Literal["no", "fp16", "bf16", "power_sgd"] = declare(
        "no", "Compress gradients for communication: to 16 bits, or to a low-rank product."
    )
    comm_wrapper: Literal["no", "fp16", "bf16"] = declare("no", "Number format of the comm hook's messages.")
    power_sgd_rank: Annotated[Annotated[Int, Field(ge=1, le=65536)], BeforeValidator(read_int)] = declare(
        1, "Rank of the matrices that PowerSGD sends: a larger rank is more exact and sends more."
    )
    power_sgd_start: Annotated[Annotated[Int, Field(ge=2, le=MAX_SEED)], BeforeValidator(read_int)] = declare(
        1000, "First step in which PowerSGD compresses; gradients of earlier steps are not compressed.", unit="steps"
    )
    power_sgd_min_compression: Annotated[Annotated[Float, Field(gt=0)], BeforeValidator(read_float)] = declare(
        2.0, "Compress only tensors that PowerSGD shrinks by at least this factor.", unit="times"
    )
    power_sgd_error_feedback: Switch = declare(
        True, "Add PowerSGD's compression error to the next step's gradients; needs the memory of all gradients again."
    )
    power_sgd_warm_start: Switch = declare(True, "Start PowerSGD's iteration from the matrices of the previous step.")
    power_sgd_seed: Annotated[Annotated[Int, Field(ge=0, le=2**32 - 1)], BeforeValidator(read_int)] = declare(
        0, "Seed of PowerSGD's initial matrices."
    )


class FsdpOptions(Section):
    """Options of PyTorch's fully_shard: each worker holds a shard of the model."""

    wrap: Annotated[Literal["blocks", "size", "classes", "model"], BeforeValidator(read_text)] = declare(
        "blocks",
        "Modules whose parameters are gathered, used and freed together: repeated blocks of the model, modules of "
        "min_params parameters, modules of the given classes, or the whole model.",
    )
    min_params: Annotated[Annotated[Int, Field(ge=1, le=MAX_SEED)], BeforeValidator(read_int)] = declare(
        1_000_000, "Minimum size of a module that is gathered by size.", unit="parameters"
    )
    classes: Annotated[tuple[Name, ...], BeforeValidator(read_names), AfterValidator(without_duplicates)] = declare(
        (),
        "Class names of the modules whose parameters are gathered together.",
        metavar="NAMES",
        allowed="class names, separated by commas",
    )
    reshard_after_forward: Switch = declare(
        True, "Free gathered parameters after the forward pass and gather them again: less memory, more communication."
    )
    hybrid_shard_size: Annotated[Workers | None, BeforeValidator(read_int)] = declare(
        None,
        "Number of workers that share one replica of the model, such as those of one machine; if not set, all.",
        unit="workers",
    )
    cpu_offload: Switch = declare(False, "Keep parameters, gradients and optimizer state in host memory.")
    autocast: Switch = declare(
        False,
        "Choose the number format of each operation, as autocast does on one device; else parameters are gathered and "
        "used in bf16 or fp16, which halves communication. In both cases optimizers step the original weights.",
    )
    reduce_dtype: Literal["fp32", "compute"] = declare(
        "fp32", "Number format in which half-precision gradients are averaged: float32, or that of the computation."
    )
    float8_gather: Switch = declare(
        False,
        "Gather the weights of fp8 layers in float8, which is half the communication of bf16; for recipe tensorwise.",
    )
    average_unused: Switch = declare(
        False,
        "Use a zero gradient for parameters that a worker did not use: needed if workers use different parameters in a "
        "step.",
    )
    weights: PathText = declare(
        None,
        "Safetensors from which models on the meta device (torch.device('meta'), init_empty_weights) are loaded: each "
        "worker reads its shards only.",
        metavar="PATH",
        allowed="the path of a safetensors file, of an index of several, or of their folder, or none",
    )
    forward_methods: Annotated[tuple[Name, ...], BeforeValidator(read_names), AfterValidator(without_duplicates)] = (
        declare(
            (),
            "Methods other than forward that compute with the model's parameters, such as encode.",
            metavar="NAMES",
            allowed="names of methods, separated by commas",
        )
    )


class DeepspeedOptions(Section):
    """Options of DeepSpeed's ZeRO: each worker holds a shard of the training state."""

    zero_stage: Annotated[Literal[1, 2, 3], BeforeValidator(read_int)] = declare(
        2,
        "What is partitioned among the workers: 1 optimizer state, 2 also gradients, 3 also parameters.",
        flag="zero-stage",
    )
    offload_optimizer: Annotated[Literal["no", "cpu"], BeforeValidator(read_text)] = declare(
        "no", "Keep optimizer state in host memory, and run the optimizer on the CPU."
    )
    offload_parameters: Annotated[Literal["no", "cpu"], BeforeValidator(read_text)] = declare(
        "no", "Keep partitioned parameters in host memory; stage 3."
    )
    bucket_size: Annotated[Annotated[Int, Field(ge=2, le=MAX_SEED)], BeforeValidator(read_int)] = declare(
        500_000_000, "Maximum number of elements that are averaged or gathered in one message.", unit="elements"
    )
    prefetch_size: Annotated[Annotated[Int, Field(ge=0, le=MAX_SEED)], BeforeValidator(read_int)] = declare(
        50_000_000,
        "Maximum number of elements that are prefetched before a module needs them; stage 3.",
        unit="elements",
    )
    persistent_size: Annotated[Annotated[Int, Field(ge=0, le=MAX_SEED)], BeforeValidator(read_int)] = declare(
        100_000, "Parameters of at most this size stay whole on each worker between steps; stage 3.", unit="elements"
    )
    overlap_comm: Switch = declare(False, "Average gradients while others are computed; stages 2 and 3, on GPUs.")
    weights: PathText = declare(
        None,
        "Safetensors from which models on the meta device (torch.device('meta'), init_empty_weights) are loaded, each "
        "worker reading its shard only; stage 3.",
        metavar="PATH",
        allowed="the path of a safetensors file, of an index of several, or of their folder, or none",
    )
    allow_untested_optimizer: Switch = declare(
        False,
        "Accept optimizers that are not known to be elementwise, as they must be, since parameters are partitioned at "
        "any element.",
    )


class XlaOptions(Section):
    """Options of training by PyTorch/XLA."""

    shard_params: Switch = declare(
        False,
        "Shard parameters, gradients and optimizer state over the chips of a worker, and not only the batch.",
    )


class AccumulationOptions(Section):
    """Handling of accumulation windows; the option ``accumulate`` is their number of batches."""

    tail: Literal["step", "carry", "drop"] = declare(
        "step",
        "Handling of a window that is incomplete at the end of the loader: step takes an optimizer step, carry "
        "continues the window in the next epoch, drop discards its gradients.",
    )
    sync_each_batch: Switch = declare(
        False,
        "Average gradients over ranks after every batch instead of once per window: more communication, less memory if "
        "gradients are sharded.",
    )


class AutocastOptions(Section):
    """Options of torch.autocast."""

    enabled: Switch = declare(
        True, "Run forward passes under autocast in the run's precision; off leaves autocast to the cell."
    )
    cache_enabled: Switch = declare(True, "Keep the low precision copies of weights within one autocast region.")


class ScalerOptions(Section):
    """Options of the loss scaling of fp16, with PyTorch's own names and defaults."""

    init_scale: Annotated[Annotated[Float, Field(gt=0)], BeforeValidator(read_float)] = declare(
        65536.0, "Initial loss scale."
    )
    growth_factor: Annotated[Annotated[Float, Field(gt=1)], BeforeValidator(read_float)] = declare(
        2.0, "Factor of the scale after growth_interval steps without overflow."
    )
    backoff_factor: Annotated[Annotated[Float, Field(gt=0, lt=1)], BeforeValidator(read_float)] = declare(
        0.5, "Factor of the scale when gradients overflow."
    )
    growth_interval: Annotated[Annotated[Int, Field(ge=1, le=1_000_000_000)], BeforeValidator(read_int)] = declare(
        2000, "Steps without overflow after which the scale grows.", unit="steps"
    )
    enabled: Switch = declare(True, "Scale losses in fp16; if off, small gradients become zero.")


class Fp8Options(Section):
    """Options of 8-bit floating point (precision fp8), by torchao."""

    recipe: Annotated[Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"], BeforeValidator(read_text)] = declare(
        "tensorwise",
        "Granularity of scales: one for a tensor, which is fastest, or one for each row, which is more exact; the last "
        "recipe computes the gradients of weights in bf16.",
    )
    emulate: Switch = declare(
        False, "Round to float8 and multiply in float32, for tests on hardware without float8; slow."
    )
    skip_modules: Annotated[
        tuple[ModuleName, ...] | None, BeforeValidator(read_parts), AfterValidator(without_duplicates)
    ] = declare(
        None,
        "Names, or dot-separated parts of names, of layers that stay in bf16; if not set, the first and the last "
        "linear layer.",
        metavar="NAMES",
        allowed="names of modules such as head or blocks.0, separated by commas, or none",
    )
    trial_rows: Annotated[Annotated[Int, Field(ge=0, le=1_000_000)], BeforeValidator(read_int)] = declare(
        0,
        "Before training, measure the layers in fp8 and in bf16 on this many rows (tokens of a batch), and report "
        "which is faster; 0 measures nothing.",
        unit="rows",
    )


class GroupOptions(Section):
    """Options of the process group, where this process opens it itself (under torchrun)."""

    backend: Annotated[Literal["auto", "gloo", "nccl"], BeforeValidator(read_text)] = declare(
        "auto", "Backend of collectives; auto is nccl for CUDA devices and gloo for all others."
    )
    timeout: Annotated[Annotated[Float, Field(gt=0, le=MONTH_S)], BeforeValidator(read_seconds)] = declare(
        1800.0,
        "Time that a rank waits for the others in a collective before it raises.",
        unit="seconds",
        metavar="SECONDS|10min",
        allowed="a number of seconds, or a duration such as 30s, 10min, 1.5h or 1d (up to 30d)",
    )


class MeshOptions(Section):
    """The arrangement of the workers in dimensions; the remaining dimension divides the data."""

    tp: Annotated[Annotated[Int, Field(ge=1, le=256)], BeforeValidator(read_int)] = declare(
        1,
        "Number of workers that compute each layer together (tensor parallelism): each holds a shard of the weights of "
        "linear layers. The other dimension divides the data; along it each worker has a replica of the model, or with "
        "strategy fsdp a shard.",
        unit="workers",
        flag="tp",
    )
    cp: Annotated[Annotated[Int, Field(ge=1, le=256)], BeforeValidator(read_int)] = declare(
        1,
        "Number of workers that compute each sequence together (context parallelism): each computes the blocks of a "
        "model for a part of the sequence, with attention to all of it.",
        unit="workers",
        flag="cp",
    )
    pp: Annotated[Annotated[Int, Field(ge=1, le=256)], BeforeValidator(read_int)] = declare(
        1,
        "Number of stages, each on one worker of a replica (pipeline parallelism): a worker holds and computes some of "
        "the repeated blocks of a model.",
        unit="stages",
        flag="pp",
    )
    ep: Annotated[Annotated[Int, Field(ge=1, le=256)], BeforeValidator(read_int)] = declare(
        1,
        "Number of workers that divide the experts of mixture-of-experts layers among them (expert parallelism): each "
        "reads other samples, and sends each token to the workers that hold its experts.",
        unit="workers",
        flag="ep",
    )
    stages_per_rank: Annotated[Annotated[Int, Field(ge=1, le=64)], BeforeValidator(read_int)] = declare(
        1,
        "Number of stages that each worker of a pipeline computes: worker r has stages r, r + pp, and so on "
        "(interleaved stages, also called virtual stages), which wait less for each other and exchange more.",
        unit="stages",
    )
    micro_batches: Annotated[Annotated[Int, Field(ge=1, le=4096)], BeforeValidator(read_int)] = declare(
        4,
        "Number of parts of a batch that pass through the stages one after another, so that all stages compute at the "
        "same time. A batch with fewer rows has fewer parts.",
        unit="micro-batches",
    )
    split_points: Annotated[tuple[ModuleName, ...], BeforeValidator(read_names), AfterValidator(without_duplicates)] = (
        declare(
            (),
            "Names of the blocks with which the second and each later stage begins, as in layers.4; if not set, stages "
            "have about the same number of parameters.",
            metavar="NAMES",
            allowed="names of modules, separated by commas",
        )
    )


class CompileOptions(Section):
    """Options of torch.compile for prepared models."""

    backend: Annotated[Annotated[str, Field(strict=True, min_length=1, max_length=64)], BeforeValidator(read_text)] = (
        declare(
            "no",
            "Compile models with this backend, such as inductor; no does not compile.",
            metavar="BACKEND",
            allowed="no, inductor, or another backend of torch.compile",
        )
    )
    mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"], BeforeValidator(read_text)
    ] = declare("default", "Mode of torch.compile: how much time compilation may take for faster code.")
    fullgraph: Switch = declare(False, "Raise for models that cannot be compiled as one graph.")
    dynamic: Annotated[Literal["auto", "yes", "no"], BeforeValidator(read_text)] = declare(
        "auto", "Compile for dynamic shapes; auto does so at the second shape."
    )
    regional: Switch = declare(
        True, "Compile each kind of repeated block once instead of the whole model: compilation is many times faster."
    )


class DataOptions(Section):
    """Options of loading data."""

    dispatch_batches: Annotated[Switch | None, BeforeValidator(read_text)] = declare(
        None,
        "Load batches on rank 0 only, which sends each rank its share; else each rank loads its own. If not set, it is "
        "on for iterable datasets that cannot divide themselves, if the batch size is each worker's.",
        metavar="true|false",
    )
    even_batches: Switch = declare(
        False,
        "Divide samples equally among ranks, by repeating some from the start of the epoch if necessary; else shares "
        "may differ by one sample and are weighted, and no sample is repeated.",
    )
    use_seedable_sampler: Switch = declare(
        False, "Shuffle in an order that depends only on data_seed and the epoch, not on the state of a generator."
    )
    data_seed: Annotated[Annotated[Int, Field(ge=0, le=MAX_SEED)] | None, BeforeValidator(read_int)] = declare(
        None, "Seed of use_seedable_sampler; if not set, the option seed, else rank 0's initial seed.", metavar="S"
    )
    resume_stream: Annotated[Literal["refuse", "replay"], BeforeValidator(read_text)] = declare(
        "refuse",
        "Resuming in the middle of an epoch of an iterable dataset without state_dict: refuse raises, replay loads the "
        "batches that were trained on again and drops them.",
    )
    non_blocking: Annotated[Switch | None, BeforeValidator(read_text)] = declare(
        None,
        "Copy the next batch to the GPU during the current step. If not set, it is on if the loader pins memory and "
        "has worker processes, since otherwise the next batch would be loaded early in this process.",
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
        default_factory=DeepspeedOptions, description="DeepSpeed ZeRO: a part of the training state on each rank."
    )
    xla: XlaOptions = Field(
        default_factory=XlaOptions, description="PyTorch/XLA: each worker drives all its visible chips."
    )


class CheckpointOptions(Section):
    """The place of checkpoints, and how many are kept."""

    dir: PathText = declare(
        None,
        "Folder or URL of the checkpoints; a checkpoint that is saved without a name is called step_N.",
        metavar="DIR",
        allowed="the path of a folder, a URL such as s3://bucket/run, or none",
        flag="checkpoint",
    )
    every: Annotated[
        Annotated[Int, Field(ge=1, le=1_000_000_000)] | Annotated[str, Field(strict=True, max_length=32)] | None,
        BeforeValidator(read_int),
        AfterValidator(as_duration),
    ] = declare(
        None,
        "Save a checkpoint after every N optimizer steps, or after each such duration, in the background between two "
        "steps.",
        flag="every",
        metavar="N|10min",
        allowed="a whole number of steps, a duration such as 30s, 10min, 1.5h or 1d (up to 30d), or none",
    )
    resume: PathText = declare(
        None,
        "Resume from a checkpoint: auto is the newest complete one in checkpoint.dir, if any. Loops over epochs that "
        "were completed before yield no batches.",
        flag="resume",
        metavar="auto|PATH",
        allowed="auto, the path or URL of a checkpoint or of a folder of checkpoints, or none",
    )
    total_limit: Annotated[Annotated[Int, Field(ge=1, le=1_000_000)] | None, BeforeValidator(read_int)] = declare(
        None,
        "Keep at most this many step_N of a run; older ones are removed when a new one is complete. If not set, keep "
        "all.",
        unit="checkpoints",
    )


class MetricsOptions(Section):
    """Metrics of a run for monitoring systems. All are off by default, and computed in the notebook's process."""

    port: Annotated[Annotated[Int, Field(ge=0, le=65535)] | None, BeforeValidator(read_int)] = declare(
        None,
        "Serve metrics for Prometheus at http://127.0.0.1:PORT/metrics, to this machine only; 0 uses a free port.",
        metavar="PORT",
        scope="cell",
    )
    textfile: PathText = declare(
        None,
        "Write metrics for the textfile collector of Prometheus' node exporter, to a file whose name ends in .prom.",
        metavar="FILE",
        allowed="the path of a file, or none",
        scope="cell",
    )
    statsd: Annotated[
        Annotated[str, Field(strict=True, max_length=256)] | None,
        BeforeValidator(read_text),
        AfterValidator(as_address),
    ] = declare(
        None,
        "Send metrics to StatsD, or to Datadog's agent.",
        metavar="HOST:PORT",
        allowed="a host and a port, such as 127.0.0.1:8125, or none",
        scope="cell",
    )
    statsd_tags: Switch = declare(
        True, "Send labels as Datadog's tags; if off, as parts of the names, as plain StatsD requires.", scope="cell"
    )
    otlp: Annotated[
        Annotated[str, Field(strict=True, max_length=2048)] | None, BeforeValidator(read_text), AfterValidator(as_url)
    ] = declare(
        None,
        "Send metrics to a collector of OpenTelemetry, by OTLP over HTTP.",
        metavar="URL",
        allowed="a URL such as http://127.0.0.1:4318/v1/metrics, or none",
        scope="cell",
    )


class NotifyOptions(Section):
    """Notifications of the user about the end of a long run."""

    url: Annotated[
        Annotated[str, Field(strict=True, max_length=2048)] | None, BeforeValidator(read_text), AfterValidator(as_url)
    ] = declare(
        None,
        "Post a JSON object to this URL when a run has ended; its text and content are what Slack, Mattermost and "
        "Discord show.",
        metavar="URL",
        allowed="a URL such as https://hooks.slack.com/services/..., or none",
        scope="cell",
    )
    command: Annotated[
        Annotated[str, Field(strict=True, min_length=1, max_length=4096)] | None, BeforeValidator(read_text)
    ] = declare(
        None,
        "Start this program when a run has ended: the message is its last argument, a JSON object its input. Not "
        "allowed in the metadata of a notebook.",
        metavar="COMMAND",
        allowed="a command line, or none",
        scope="cell",
        refused_layers=["notebook"],
    )
    after: Annotated[Annotated[Float, Field(ge=0, le=MONTH_S)], BeforeValidator(read_seconds)] = declare(
        60.0,
        "Notify of runs that took at least this long.",
        unit="seconds",
        metavar="SECONDS|10min",
        allowed="a number of seconds, or a duration such as 30s, 10min, 1.5h or 1d (up to 30d)",
        scope="cell",
    )
