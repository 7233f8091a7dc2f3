"""``import accelerate`` finds ours: modules, names, version, refusals, and the way back."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accel_nb
from accel_nb import compat
from accel_nb.compat import program
from accel_nb.compat.names import availability
from accel_nb.compat.names.table import MODULES, UNSUPPORTED_REASONS
from accel_nb.errors import ConfigError, MisuseError, NanLossError
from tests.compat.peer_names import PAGE, lacking_members, page, peer


@pytest.fixture
def without_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the real package from the imported modules: an earlier test of this process may have imported it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def installed(without_peer: None) -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_module_and_name_of_the_tables_is_there_or_says_why_not(module: str) -> None:
    found = importlib.import_module(module)
    for name in MODULES[module]:
        if name in found.__all__:
            assert getattr(found, name) is not None
            continue
        assert name in UNSUPPORTED_REASONS, f"{name} is neither offered nor refused"
        assert not hasattr(found, name)
        with pytest.raises(ImportError, match=f"{name} is not offered by accel_nb: .*"):
            exec(f"from {module} import {name}", {})


@pytest.mark.usefixtures("installed")
def test_usual_imports_give_our_objects() -> None:
    scope: dict[str, Any] = {}
    exec(
        "import accelerate\n"
        "from accelerate import Accelerator, DistributedType, PartialState, skip_first_batches\n"
        "from accelerate.tracking import GeneralTracker, on_main_process\n"
        "from accelerate.state import is_initialized\n"
        "from accelerate.utils import ProjectConfiguration, set_seed, tqdm, gather_object, DynamoBackend\n"
        "from accelerate.utils.memory import release_memory\n"
        "import accelerate.utils.tqdm\n"
        "from accelerate.local_sgd import LocalSGD\n"
        "from accelerate.inference import prepare_pippy\n"
        "from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model\n"
        "from accelerate.logging import get_logger\n"
        "from accelerate.state import AcceleratorState, GradientState\n",
        scope,
    )
    assert issubclass(scope["Accelerator"], accel_nb.Accelerator)
    assert scope["is_initialized"]()
    assert scope["on_main_process"](lambda tracker, value: value)(None, 3) == 3
    assert scope["tqdm"] is scope["accelerate"].utils.tqdm is accel_nb.tqdm
    assert scope["accelerate"].__version__ == compat.COMPATIBLE_VERSION
    assert "INDUCTOR" in scope["DynamoBackend"].list()
    assert not hasattr(scope["accelerate"], "no_such_name")
    for statement in ("from accelerate import no_such_name", "from accelerate.logging import no_such_name"):
        with pytest.raises(ImportError, match=r"no_such_name is not offered by accel_nb: .*docs/migration.md"):
            exec(statement, {})


@pytest.mark.usefixtures("installed")
def test_modules_have_a_file_for_programs_that_look_for_their_folder() -> None:
    import accelerate.utils  # pyright: ignore

    for module in (accelerate, accelerate.utils):
        assert Path(inspect.getfile(module)).is_file()
        assert "accel_nb" in inspect.getfile(module)


@pytest.mark.usefixtures("installed")
def test_libraries_read_the_version() -> None:
    assert importlib.metadata.version("accelerate") == "1.15.0"
    assert "github.com/huggingface" in importlib.metadata.metadata("accelerate")["Home-page"]  # sentence-transformers
    assert importlib.util.find_spec("accelerate") is not None
    assert importlib.metadata.version("torch").startswith(torch.__version__.partition("+")[0])
    assert "accelerate" in {distribution.name for distribution in importlib.metadata.distributions()}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("from accelerate import GPTTrainStep", "strategy='fsdp'"),
        ("from accelerate.utils import finish_mpu_init", "strategy='fsdp'"),
        ("import accelerate.not_there", "no counterpart"),
    ],
)
def test_what_is_not_offered_says_which_part_would_provide_it(statement: str, words: str) -> None:
    with pytest.raises(ImportError, match=f"is not offered by accel_nb: .*{words}"):
        exec(statement, {})


def test_every_name_of_the_other_package_imports_and_is_refused_when_it_is_used(installed: None) -> None:
    described = peer()
    names: dict[str, list[str]] = described["names"]
    assert lacking_members(described["members"]) == {}
    assert PAGE.read_text() == page(described), "write the page again: python -m tests.compat.peer_names"
    assert sum(map(len, names.values())) > 400
    lacking = []
    for module, listed in names.items():
        ours = importlib.import_module(module)
        lacking += [f"{module}.{name}" for name in listed if not hasattr(ours, name)]
    assert lacking == []
    tracker = importlib.import_module("accelerate.utils").TERecipeKwargs
    with pytest.raises(MisuseError, match=r"TERecipeKwargs is not offered by accel_nb: .*torchao"):
        tracker()
    plugin = importlib.import_module("accelerate.utils").GPTTrainStep
    with pytest.raises(MisuseError, match="GPTTrainStep is not offered by accel_nb"):
        plugin.from_environment()
    assert not hasattr(plugin, "from_environment")
    assert not hasattr(importlib.import_module("accelerate.utils"), "no_such_name")


@pytest.mark.usefixtures("installed")
def test_what_libraries_import_and_may_not_use_is_refused_when_it_is_used() -> None:
    scope: dict[str, Any] = {}
    exec(
        "from accelerate.utils import GatheredParameters, TERecipeKwargs\n"
        "from accelerate.utils.deepspeed import DeepSpeedEngineWrapper\n"
        "from accelerate.parallelism_config import ParallelismConfig\n"
        "class Own(DeepSpeedEngineWrapper):\n"
        "    def __init__(self, values):\n"
        "        self.values = values\n",
        scope,
    )
    assert not isinstance(3, scope["ParallelismConfig"])
    for name, missing in (("Own", "DeepSpeedEngineWrapper"), ("TERecipeKwargs", "TERecipeKwargs")):
        with pytest.raises(MisuseError, match=f"{missing} is not offered by accel_nb: .*"):
            scope[name]({})


@pytest.mark.nightly
def test_transformers_models_are_found_under_our_name() -> None:
    pytest.importorskip("transformers")
    code = (
        "import accel_nb.compat\naccel_nb.compat.install()\n"
        "from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.usefixtures("without_peer")
def test_helpers_of_tests_are_those_of_the_real_package_over_our_names() -> None:
    """Suites of other libraries import them."""
    compat.install()
    testing = importlib.import_module("accelerate.test_utils.testing")
    assert Path(testing.__file__ or "").parts[-3:] == ("accelerate", "test_utils", "testing.py")
    assert testing.AcceleratorState is importlib.import_module("accelerate.state").AcceleratorState
    assert testing.get_backend()[0] == "cpu"
    with pytest.raises(ImportError, match=r"test_utils\.absent is not offered by accel_nb"):
        importlib.import_module("accelerate.test_utils.absent")
    compat.uninstall()
    assert "accelerate.test_utils.testing" not in sys.modules


def test_helpers_of_tests_are_refused_without_the_real_package(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ImportError, match="which is there if accelerate is installed too"):
        importlib.import_module("accelerate.test_utils")


@pytest.mark.usefixtures("without_peer")
def test_uninstalling_brings_the_real_package_back() -> None:
    compat.install()
    compat.install()
    assert compat.is_installed()
    compat.uninstall()
    assert not compat.is_installed()
    assert "accelerate" not in sys.modules
    found = importlib.util.find_spec("accelerate")
    assert found is None or found.origin != "accel_nb"


def test_installing_after_the_real_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", type(sys)("accelerate"))
    with pytest.raises(MisuseError, match=r"accelerate is imported already.*before anything imports it"):
        compat.install()
    assert not compat.is_installed()


def test_the_package_is_reached_as_an_attribute_and_installs_without_torch() -> None:
    code = (
        "import sys, accel_nb\naccel_nb.compat.install()\nimport accelerate, accelerate.utils\n"
        "assert 'torch' not in sys.modules\nfrom accelerate import Accelerator\nassert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.usefixtures("installed")
def test_classes_report_what_is_prepared() -> None:
    data_loader, optimizers = (
        importlib.import_module("accelerate.data_loader"),
        importlib.import_module("accelerate.optimizer"),
    )
    schedulers = importlib.import_module("accelerate.scheduler")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, loader = torch.optim.lr_scheduler.StepLR(optimizer, 1), DataLoader(range(2))
    kinds = {
        data_loader.DataLoaderShard: loader,
        optimizers.AcceleratedOptimizer: optimizer,
        schedulers.AcceleratedScheduler: scheduler,
    }
    assert not any(isinstance(item, kind) for kind, item in kinds.items())
    accelerator = accel_nb.Accelerator(cpu=True)
    accelerator.prepare(model, optimizer, scheduler, loader)
    assert all(isinstance(item, kind) for kind, item in kinds.items())
    assert not isinstance(model, optimizers.AcceleratedOptimizer)
    accelerator.close()
    assert not any(isinstance(item, kind) for kind, item in kinds.items())
    with pytest.raises(MisuseError, match="AcceleratedOptimizer is not built here"):
        optimizers.AcceleratedOptimizer(optimizer)


@pytest.mark.usefixtures("installed")
def test_absent_names_raise_the_errors_of_python() -> None:
    utils = importlib.import_module("accelerate.utils")
    for name in ("finish_mpu_init", "no_such_name"):
        assert getattr(utils, name, 3) == 3
        with pytest.raises(AttributeError, match=f"{name} is not offered by accel_nb: ") as found:
            getattr(utils, name)
        assert (found.value.name, found.value.obj) == (name, utils)


def test_commands_are_refused_without_the_real_package(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModuleNotFoundError, match="command line is there if accelerate is installed too"):
        importlib.import_module("accelerate.commands.config")


@pytest.mark.usefixtures("installed")
def test_the_accelerator_takes_arguments_by_position_as_the_other_package_does() -> None:
    kind = importlib.import_module("accelerate").Accelerator
    accelerator = kind(True, False, "bf16", 3, True)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 3)
    assert accelerator.device == torch.device("cpu")
    accelerator.close()
    ours = list(inspect.signature(kind).parameters)[:-1]
    assert ours == peer()["names"]["accelerate"]["Accelerator"]


@pytest.mark.usefixtures("installed")
def test_a_loss_that_is_nan_is_trained_on_unless_the_option_is_set() -> None:
    kind = importlib.import_module("accelerate").Accelerator
    for config in (None, {"sentinels": True}):
        accelerator = kind(cpu=True, config=config)
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        loss = model(torch.tensor([[float("nan")]])).sum()
        if config is None:
            accelerator.backward(loss)
        else:
            with pytest.raises(NanLossError, match="step 1 is NaN"):
                accelerator.backward(loss)
        accelerator.close()


@pytest.mark.usefixtures("installed")
def test_a_model_for_evaluation_stays_in_the_precision_of_the_run_when_memory_is_freed() -> None:
    kind = importlib.import_module("accelerate").Accelerator
    torch.manual_seed(0)
    inputs, reference = torch.randn(4, 16), torch.nn.Linear(16, 16)
    plain = reference(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = reference(inputs).float()
    assert not torch.equal(plain, rounded)
    accelerator = kind(mixed_precision="bf16", cpu=True)
    trained = accelerator.prepare(torch.nn.Linear(16, 1))
    accelerator.prepare_model(reference, evaluation_mode=True)
    assert accelerator._models == [trained, reference]
    accelerator.free_memory()
    assert accelerator._models == []
    assert torch.equal(reference(inputs), rounded)
    kind(cpu=True).prepare_model(reference, evaluation_mode=True)
    assert torch.equal(reference(inputs), plain), "another accelerator has released the model first"


@pytest.mark.usefixtures("installed")
def test_scalars_of_a_single_process_stay_scalars() -> None:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    value = torch.tensor(2.0)
    utils = importlib.import_module("accelerate.utils")
    for gather in (accelerator.gather, accelerator.gather_for_metrics, utils.gather):
        assert gather(value).shape == ()
        assert [found.shape for found in gather({"a": value, "b": value.repeat(3)}).values()] == [(), (3,)]


@pytest.mark.usefixtures("installed")
def test_an_accelerator_that_takes_over_an_object_leaves_the_others_prepared() -> None:
    kind = importlib.import_module("accelerate").Accelerator
    first, second = kind(mixed_precision="bf16", cpu=True), kind(cpu=True)
    one, two = first.prepare(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    second.prepare(one)
    assert (first._models, second._models) == ([two], [one])


@pytest.mark.usefixtures("installed")
def test_samples_are_repeated_if_an_argument_asks_for_it() -> None:
    package = importlib.import_module("accelerate")
    made = package.DataLoaderConfiguration
    for given, is_even in ((made(), False), (made(even_batches=True), True), (made(False, None, True), True)):
        assert given.to_dict()["even_batches"] is True
        accelerator = package.Accelerator(cpu=True, dataloader_config=copy.copy(given))
        assert accelerator.even_batches is is_even
        accelerator.close()
    with pytest.raises(ConfigError, match="even_batches"):
        package.Accelerator(dataloader_config=made(even_batches=True), config={"data": {"even_batches": False}})


@pytest.mark.usefixtures("installed")
def test_little_functions_do_what_they_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    utils = importlib.import_module("accelerate.utils")
    assert utils.str_to_bool("Yes") == 1
    assert utils.str_to_bool("off", to_bool=True) is False
    with pytest.raises(ValueError, match="neither yes nor no"):
        utils.str_to_bool("maybe")
    with utils.patch_environment(some_flag="on", number=3):
        assert utils.parse_flag_from_env("SOME_FLAG")
        assert utils.get_int_from_env(["MISSING", "NUMBER"], 0) == 3
        assert utils.parse_choice_from_env("SOME_FLAG") == "on"
        with utils.clear_environment():
            assert utils.parse_choice_from_env("SOME_FLAG", "no") == "no"
    assert utils.parse_flag_from_env("SOME_FLAG") is False
    assert utils.is_torch_version(">=", "2.6")
    assert utils.compare_versions("torch", "<", "99")
    with pytest.raises(ValueError, match="is not a comparison"):
        utils.compare_versions("torch", "~", "1")
    assert utils.merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"c": 2, "b": 1}}
    assert utils.recursive_getattr(nn.Linear(2, 3), "weight.shape") == (3, 2)
    assert utils.convert_bytes(2048) == "2.0 KB"
    assert utils.honor_type((1, 2), iter([3, 4])) == (3, 4)
    assert utils.is_torch_tensor(torch.ones(1))
    assert utils.is_fp16_available()
    assert not utils.is_npu_available()
    assert utils.is_tensorboard_available() in (True, False)
    assert not utils.is_wandb_available() or importlib.util.find_spec("wandb")
    (tmp_path / "aim").mkdir()  # a folder of results is no package
    monkeypatch.syspath_prepend(tmp_path)
    assert not utils.is_aim_available()
    assert utils.is_port_in_use(1) is False
    model = nn.Linear(1, 1)
    assert utils.extract_model_from_parallel(model, False, False).weight is model.weight


@pytest.mark.usefixtures("installed")
def test_walks_over_nested_tensors() -> None:
    utils = importlib.import_module("accelerate.utils")
    batch = {"x": torch.arange(6).reshape(3, 2), "y": [torch.ones(3, dtype=torch.bfloat16)]}
    assert utils.find_batch_size(batch) == 3
    assert utils.find_device(batch) == torch.device("cpu")
    assert utils.find_device([1]) is None
    assert utils.listify({"x": torch.tensor([1, 2])}) == {"x": [1, 2]}
    assert utils.slice_tensors(batch, slice(0, 2))["x"].shape == (2, 2)
    assert utils.slice_tensors(batch, slice(0, 3, 2))["x"].tolist() == [[0, 1], [4, 5]]
    mixed = {"x": torch.ones(4, 1), "table": torch.arange(6), "names": ["a", "b", "c", "d"]}
    for cut in (slice(1, 3), slice(0, 4, 2)):
        sliced = utils.slice_tensors(mixed, cut)
        assert (sliced["x"].shape, sliced["names"]) == ((2, 1), mixed["names"])
        assert sliced["table"].tolist() == mixed["table"][cut].tolist()
    assert utils.concatenate([batch, batch])["x"].shape == (6, 2)
    assert utils.concatenate([torch.ones(2, 1), torch.zeros(2, 2)], dim=1).shape == (2, 3)
    assert utils.convert_to_fp32(batch)["y"][0].dtype == torch.float32
    assert utils.convert_outputs_to_fp32(lambda: torch.ones(1, dtype=torch.float16))().dtype == torch.float32
    moved = utils.send_to_device(batch, "meta", skip_keys="y")
    assert (moved["x"].device.type, moved["y"][0].device.type) == ("meta", "cpu")
    moved = utils.send_to_device([(batch, 1), {"z": {"y": torch.ones(1), "x": torch.ones(1)}}], "meta", skip_keys=["y"])
    assert [item.device.type for item in (moved[0][0]["x"], moved[0][0]["y"][0])] == ["meta", "cpu"]
    assert {key: item.device.type for key, item in moved[1]["z"].items()} == {"y": "cpu", "x": "meta"}
    doubled = utils.recursively_apply(lambda tensor, by: tensor * by, batch, 2)
    assert doubled["x"].sum() == 2 * batch["x"].sum()
    with pytest.raises(TypeError, match="does not apply to a str"):
        utils.recursively_apply(torch.neg, [torch.ones(1), "a"], error_on_other_type=True)
    assert utils.gather(torch.tensor(3)).tolist() == 3
    assert utils.gather_object([1, 2]) == [1, 2]
    assert utils.reduce(torch.tensor(4.0), scale=0.5).item() == 4.0  # XLA's alone
    assert utils.reduce(torch.tensor(4.0), "none").item() == 4.0
    assert utils.broadcast_object_list(["a"]) == ["a"]
    assert utils.broadcast(torch.tensor(2)).item() == 2
    assert utils.pad_across_processes(torch.ones(2)).shape == (2,)
    utils.wait_for_everyone()


def test_a_folder_is_not_taken_for_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder_of_results").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not availability.is_folder_of_results_available()


def test_a_package_is_found_in_a_version_or_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("")
    facts = tmp_path / "bitsandbytes-0.44.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 0.44.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [availability.is_bnb_available(version) for version in (None, "0.43.1", "0.44.0", "0.45")]
    assert found == [True, True, True, False]
    assert availability.is_numpy_available()
    assert not availability.is_numpy_available(min_version="99")


def test_a_program_without_a_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in ([], ["-m"]):
        monkeypatch.setattr(sys, "argv", ["program", *words])
        with pytest.raises(SystemExit, match="needs a script"):
            program.main()
