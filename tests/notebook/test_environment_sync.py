"""What a cell finds around it on the workers: variables, modules, and names that could not be sent."""

from __future__ import annotations

import pytest

from tests.notebook.cells import done, run, setup

OWN_KERNEL = True
"""Settings of the kernel are changed."""


def test_environment_variables_follow_the_notebook(kernel):
    read = "import os\nfound = {name: os.environ.get(name) for name in ('A_B_C', 'HOME', 'RANK')}"
    setup(kernel, "import os\nos.environ['A_B_C'] = 'one'\nos.environ['RANK'] = '77'")
    done(kernel, read)
    home = kernel.value("os.environ.get('HOME')")
    assert kernel.value("found") == {"A_B_C": "one", "HOME": home, "RANK": "0"}
    done(kernel, "import os\nos.environ['A_B_C'] = 'mine'")
    done(kernel, read)
    assert kernel.value("found")["A_B_C"] == "mine", "a cell's own change stays until the notebook changes it"
    setup(kernel, "del os.environ['A_B_C'], os.environ['RANK']\nkept = os.environ.pop('HOME', None)")
    done(kernel, read)
    assert kernel.value("found") == {"A_B_C": None, "HOME": None, "RANK": "0"}
    setup(kernel, "if kept is not None: os.environ['HOME'] = kept")
    done(kernel, read)
    assert kernel.value("found")["HOME"] == home


def test_fresh_workers_have_the_variables_too(kernel):
    setup(kernel, "import os\nos.environ['A_B_C'] = 'two'")
    assert run(kernel, "import os\nos._exit(1)").error is not None
    done(kernel, "import os\nfound = os.environ.get('A_B_C')")
    setup(kernel, "del os.environ['A_B_C']")
    assert kernel.value("found") == "two"


def test_other_visible_gpus_need_a_restart_and_the_cell_says_so(kernel):
    done(kernel, "pass")
    setup(kernel, "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''")
    assert "`%accelerate restart` applies it" in done(kernel, "pass").texts[-1]
    setup(kernel, "%accelerate restart")
    output = done(kernel, "import os\nfound = os.environ.get('CUDA_VISIBLE_DEVICES')")
    assert "restart" not in output.texts[-1]
    assert kernel.value("found") == ""
    setup(kernel, "del os.environ['CUDA_VISIBLE_DEVICES']\n%accelerate restart")


def test_a_reloaded_module_is_reloaded_on_every_worker(kernel, tmp_path):
    module = tmp_path / "accel_nb_test_module.py"
    module.write_text("rate = 1\nclass Net:\n    def read(self): return 'old'\n")
    setup(
        kernel,
        f"import sys\nsys.dont_write_bytecode = True\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "import accel_nb_test_module as mine\nfrom accel_nb_test_module import Net\nnet = Net()",
    )
    body = "found = (mine.rate, net.read(), Net().read())"
    done(kernel, body)
    assert kernel.value("found") == (1, "old", "old")
    module.write_text("rate = 22\nclass Net:\n    def read(self): return 'changed'\n")
    setup(kernel, "import importlib\nimportlib.reload(mine)\nfrom accel_nb_test_module import Net\nnet = Net()")
    done(kernel, "first = mine.rate", "--cpus 2 --ranks 1")
    output = done(kernel, "print(mine.rate)", "--cpus 2 --show-ranks all")
    assert sorted(output.stdout.splitlines()) == ["[rank 0] 22", "[rank 1] 22"]
    done(kernel, body)
    setup(kernel, "sys.path.pop(0)\nsys.dont_write_bytecode = False")
    assert kernel.value("found") == (22, "changed", "changed")


def test_annotations_name_things_of_earlier_cells(kernel):
    setup(kernel, "from dataclasses import dataclass\nimport typing\nclass First: pass\nclass Second: pass")
    done(
        kernel,
        "@dataclass\nclass Pair:\n    one: First = None\n    two: 'Second' = None\n"
        "def f(x: First, *, y: 'Second') -> Second:\n    z: First = x\n    return z\n"
        "hints = [sorted(item.__name__ for item in typing.get_type_hints(of).values()) for of in (Pair, f)]",
    )
    assert kernel.value("hints") == [["First", "Second"], ["First", "Second", "Second"]]
    assert kernel.value("typing.get_type_hints(Pair)['two'] is Second") is True


def test_imports_from_future_hold_for_later_cells_on_both_sides(kernel):
    lazy = "def lazy(x: not_there): return x\nfound = lazy(3)"
    output = run(kernel, lazy)
    assert output.error is not None
    assert output.error[0] == "NameError"
    setup(kernel, "flags = get_ipython().compile.flags")
    done(kernel, f"from __future__ import annotations\n{lazy}")
    setup(kernel, lazy)
    done(kernel, lazy)
    assert kernel.value("lazy.__annotations__") == {"x": "not_there"}
    setup(kernel, "get_ipython().compile.flags = flags")
    assert run(kernel, lazy).error is not None, "the workers compile with the notebook's flags"


def test_arguments_of_the_notebook_are_those_of_the_workers(kernel):
    setup(
        kernel,
        "import argparse, sys\nkept = sys.argv\nsys.argv = ['prog', '--rate', '0.5']\n"
        "parser = argparse.ArgumentParser()\nadded = parser.add_argument('--rate', type=float, default=1.0)",
    )
    done(kernel, "found = vars(parser.parse_args()), sys.argv")
    assert kernel.value("found") == ({"rate": 0.5}, ["prog", "--rate", "0.5"])
    setup(kernel, "sys.argv = ['prog', '--other']")
    output = run(kernel, "parser.parse_args()")
    assert output.error is not None
    assert output.error[1].startswith("argparse ended the cell, with exit code 2: it reads sys.argv, which is the note")
    assert "['prog', '--other']" in output.error[1]
    setup(kernel, "sys.argv = kept")


SETTINGS = """
import logging, sys, warnings, numpy, torch
def read_all():
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn('some noise')
    return (
        sys.getrecursionlimit(), len(caught), logging.getLogger('chatty').level, str(numpy.array([1.23456])),
        str(torch.tensor([1.23456])), numpy.geterr()['divide'], torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(), logging.root.level,
    )
before = read_all()
"""


def test_settings_of_the_process_are_the_notebooks(kernel):
    setup(kernel, SETTINGS)
    done(kernel, "found = read_all()")
    assert kernel.value("found == before") is True
    setup(
        kernel,
        "options = numpy.get_printoptions(), numpy.geterr(), sys.getrecursionlimit(), warnings.filters[:]\n"
        "sys.setrecursionlimit(4321)\nwarnings.filterwarnings('ignore', message='some noise')\n"
        "logging.getLogger('chatty').setLevel(40)\nnumpy.set_printoptions(precision=2)\n"
        "torch.set_printoptions(precision=2)\nnumpy.seterr(divide='raise')\ntorch.set_grad_enabled(False)\n"
        "torch.use_deterministic_algorithms(True)\nlogging.basicConfig(level=20, format='%(name)s says %(message)s')",
    )
    output = done(kernel, "found = read_all()\nlogging.getLogger('mine').info('hello')")
    assert output.stderr == "mine says hello\n"
    assert kernel.value("found == read_all()") is True
    assert kernel.value("found[:3]") == (4321, 0, 40)
    setup(
        kernel,
        "numpy.set_printoptions(precision=options[0]['precision'])\nnumpy.seterr(**options[1])\n"
        "sys.setrecursionlimit(options[2])\nwarnings.filters[:] = options[3]\n"
        "torch.set_printoptions(profile='default')\n"
        "torch.set_grad_enabled(True)\ntorch.use_deterministic_algorithms(False)\nlogging.root.handlers.clear()\n"
        "logging.root.setLevel(30)\nlogging.getLogger('chatty').setLevel(0)",
    )
    done(kernel, "found = read_all()")
    assert kernel.value("found == before") is True


CHANGED = """
import matplotlib, os
def read_changed():
    return (
        sys.getrecursionlimit(), logging.getLogger('chatty').level, str(numpy.array([1.23456])),
        str(torch.tensor([1.23456])), numpy.geterr(), torch.get_default_dtype(), matplotlib.rcParams['lines.linewidth'],
        os.getcwd(), os.environ.get('LEFT_BY_A_CELL'), os.environ.get('KEPT_BY_A_CELL'), sys.path[-1], list(sys.argv),
        [entry[0] for entry in warnings.filters if getattr(entry[1], 'pattern', '') == 'other noise'],
        [logging.getLogger('chatty').propagate, logging.getLogger('chatty').disabled],
    )
os.environ['LEFT_BY_A_CELL'] = 'left'
before = read_changed()
"""


def test_settings_that_a_cell_changes_are_the_notebooks_after_it(kernel, tmp_path):
    setup(kernel, SETTINGS + CHANGED)
    done(
        kernel,
        "sys.setrecursionlimit(4321)\nlogging.getLogger('chatty').setLevel(40)\nnumpy.set_printoptions(precision=2)\n"
        "torch.set_printoptions(precision=2)\nnumpy.seterr(divide='raise')\ntorch.set_default_dtype(torch.float64)\n"
        f"matplotlib.rcParams['lines.linewidth'] = 7\nos.chdir({str(tmp_path)!r})\n"
        "os.environ['KEPT_BY_A_CELL'] = 'kept'\ndel os.environ['LEFT_BY_A_CELL']\nsys.path.append('added')\n"
        "sys.argv = ['prog', '--fast']\n"
        "warnings.filterwarnings('ignore', message='other noise')\n"
        "logging.getLogger('chatty').propagate, logging.getLogger('chatty').disabled = False, True\n"
        "found = read_changed()",
    )
    assert kernel.value("found == read_changed()") is True
    assert kernel.value("[a == b for a, b in zip(found, before)]") == [False] * 14
    # Another cell has them too, on each rank, and leaves them.
    code = "equal = [None] * 2\ntorch.distributed.all_gather_object(equal, read_changed() == found)"
    done(kernel, f"import torch.distributed\n{code}")
    assert kernel.value("(equal, read_changed() == found)") == ([True, True], True)
    # Also one that raises.
    assert run(kernel, "sys.setrecursionlimit(4322)\n1 / 0").error is not None
    assert kernel.value("sys.getrecursionlimit()") == 4322
    setup(
        kernel,
        "sys.setrecursionlimit(before[0])\nlogging.getLogger('chatty').setLevel(before[1])\n"
        "numpy.set_printoptions(precision=8)\ntorch.set_printoptions(profile='default')\nnumpy.seterr(**before[4])\n"
        "torch.set_default_dtype(before[5])\nmatplotlib.rcParams['lines.linewidth'] = before[6]\nos.chdir(before[7])\n"
        "os.environ['LEFT_BY_A_CELL'] = 'left'\ndel os.environ['KEPT_BY_A_CELL'], sys.path[-1]\nsys.argv = before[11]\n"
        "logging.getLogger('chatty').propagate, logging.getLogger('chatty').disabled = True, False\n"
        "warnings.filters[:] = [item for item in warnings.filters if getattr(item[1], 'pattern', '') != 'other noise']",
    )
    done(kernel, "found = read_changed()")
    assert kernel.value("found == before") is True
    setup(kernel, "del os.environ['LEFT_BY_A_CELL']")


LIBRARIES = """
import sklearn, torch
def read_libraries():
    cuda = torch.backends.cuda
    return (
        sklearn.get_config()['transform_output'], sklearn.get_config()['assume_finite'], cuda.flash_sdp_enabled(),
        torch.multiprocessing.get_sharing_strategy(), torch.hub.get_dir(), torch.get_default_device().type,
    )
before = read_libraries()
"""


def test_settings_of_libraries_are_the_notebooks(kernel, tmp_path):
    setup(kernel, LIBRARIES)
    done(kernel, "found = read_libraries()")
    assert kernel.value("found == before") is True
    setup(
        kernel,
        "sklearn.set_config(transform_output='pandas')\ntorch.backends.cuda.enable_flash_sdp(False)\n"
        f"torch.multiprocessing.set_sharing_strategy('file_system')\ntorch.hub.set_dir({str(tmp_path)!r})",
    )
    done(kernel, "found = read_libraries()")
    assert kernel.value("found") == ("pandas", False, False, "file_system", str(tmp_path), "cpu")
    done(
        kernel,
        "sklearn.set_config(transform_output=before[0], assume_finite=True)\n"
        "torch.backends.cuda.enable_flash_sdp(True)\ntorch.multiprocessing.set_sharing_strategy(before[3])\n"
        "torch.hub.set_dir(before[4])",
    )
    assert kernel.value("read_libraries()") == ("default", True, True, "file_descriptor", *kernel.value("before[4:]"))
    setup(kernel, "sklearn.set_config(assume_finite=False)")


TRAINING = """
import torch
torch.manual_seed(0)
x = torch.randn(40, 3, device='cpu', dtype=torch.float64)
def train():
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Linear(3, 1, device='cpu', dtype=torch.float64)
    torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
    # Adam of torch 2.9 has tensors on the default device.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for rows in torch.randperm(40, generator=generator, device='cpu').split(8):
            loss = (model(x[rows]) - x[rows].sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model, optimizer
"""


@pytest.mark.parametrize("flags", ["--cpus 2", "--cpus 2 --strategy fsdp"])
def test_tensors_of_this_package_do_not_depend_on_the_default_device(kernel, flags):
    # The meta device is in the place of a GPU: a tensor that is made there has no values.
    setup(kernel, TRAINING + "torch.set_default_device('meta')")
    try:
        done(kernel, "made = torch.ones(2).device.type\nmodel, optimizer = train()\n", flags)
        assert kernel.value("(made, torch.get_default_device().type)") == ("meta", "meta")
        done(kernel, "torch.set_default_device('cpu')")
        assert kernel.value("torch.ones(2).device.type") == "cpu"
        setup(kernel, "trained, plain = model.state_dict(), train()[0].state_dict()")
        assert kernel.value("all(torch.allclose(trained[name], plain[name]) for name in plain)") is True
    finally:
        setup(kernel, "torch.set_default_device(None)")


def test_a_setting_that_a_cell_changes_and_the_notebook_changes_back_is_the_old_one_again(kernel):
    setup(kernel, SETTINGS)
    done(kernel, "logging.root.setLevel(20)\nnumpy.set_printoptions(precision=2)\nsys.setrecursionlimit(4321)")
    setup(
        kernel,
        "logging.root.setLevel(before[-1])\nnumpy.set_printoptions(precision=8)\nsys.setrecursionlimit(before[0])",
    )
    done(kernel, "found = read_all()")
    assert kernel.value("found == before") is True


def test_the_number_of_threads_that_a_cell_sets_is_the_notebooks_after_it(kernel):
    setup(kernel, "import torch\nnum_threads = torch.get_num_threads()")
    done(kernel, "pass")
    assert kernel.value("torch.get_num_threads() == num_threads") is True, "and that of the workers stays theirs"
    done(kernel, "torch.set_num_threads(3)")
    assert kernel.value("torch.get_num_threads()") == 3
    setup(kernel, "torch.set_num_threads(num_threads)")


@pytest.mark.nightly
def test_the_alias_of_accelerate_is_the_notebooks(kernel):
    setup(kernel, "%accelerate restart")
    # Without an import statement, whose module the notebook would import too.
    read = "found = __import__('accelerate').__spec__.origin == 'accel_nb'"
    done(kernel, read)
    assert kernel.value("found") is False
    setup(kernel, "from accel_nb import compat\ncompat.install()\nimport accelerate")
    for _ in range(2):
        error = run(kernel, read).error
        assert error is not None
        assert "accel_nb.compat.install(), but a cell has imported accelerate itself" in error[1]
    setup(kernel, "%accelerate restart")
    done(kernel, f"{read}\nsize = __import__('accelerate').Accelerator().num_processes")
    assert kernel.value("(found, size)") == (True, 2)
    setup(kernel, "compat.uninstall()")
    done(kernel, read)
    assert kernel.value("found") is False


@pytest.fixture
def folder(kernel, tmp_path):
    """A folder that the notebook imports from."""
    setup(kernel, f"import sys, importlib\nsys.path.insert(0, {str(tmp_path)!r})")
    yield tmp_path
    setup(kernel, "sys.path.pop(0)")


def _edit(folder, name: str, text: str) -> None:
    """Write a file; within one second, Python detects a change of a module by its size only."""
    old = folder / name
    text += "#" * (len(old.read_text()) + 1 if old.exists() else 0)
    old.parent.mkdir(exist_ok=True)
    old.write_text(text)


def _line(output) -> str:
    return next((text for text in output.texts if text.startswith("reloaded")), "")


def test_an_edited_module_is_loaded_anew_with_those_that_import_it(kernel, folder):
    _edit(folder, "edited_a.py", "RATE = 1\ndef read(): return 'old'\n")
    _edit(folder, "edited_b.py", "from edited_a import RATE, read\ndef both(): return RATE, read()\n")
    _edit(folder, "edited_p/__init__.py", "from . import sub, other\nfrom .sub import value\n")
    _edit(folder, "edited_p/sub.py", "value = 1\n")
    _edit(folder, "edited_p/other.py", "from edited_p.sub import value as v\n")
    setup(kernel, "import edited_b, edited_p\nfrom edited_a import read")
    body = (
        "import edited_p.other as other\nfound = edited_b.both(), read(), edited_p.value, edited_p.sub.value, other.v"
    )
    assert not _line(done(kernel, body))
    assert kernel.value("found") == ((1, "old"), "old", 1, 1, 1)
    _edit(folder, "edited_a.py", "RATE = 2\ndef read(): return 'new'\n")
    _edit(folder, "edited_p/sub.py", "value = 2\n")
    output = done(kernel, body)
    assert kernel.value("found") == ((2, "new"), "new", 2, 2, 2)
    assert _line(output) == (
        "reloaded on the workers: edited_a, edited_p.sub · edited, "
        "and the notebook itself still has the old code of edited_a, edited_p.sub"
    )
    assert not _line(done(kernel, body)), "once is enough"
    assert kernel.value("read()") == "old", "the notebook's own modules are its user's"


def test_a_module_that_only_workers_have_imported_is_loaded_anew(kernel, folder):
    _edit(folder, "edited_c.py", "rate = 1\n")
    body = "def read():\n    import edited_c\n    return edited_c.rate\nfound = read()"
    done(kernel, body)
    _edit(folder, "edited_c.py", "rate = 2\n")
    assert _line(done(kernel, body)) == "reloaded on the workers: edited_c"
    assert kernel.value("(found, 'edited_c' in sys.modules)") == (2, False)


def test_an_edited_module_that_cannot_be_loaded_is_an_error_until_it_is_mended(kernel, folder):
    _edit(folder, "edited_d.py", "rate = 1\n")
    done(kernel, "import edited_d")
    _edit(folder, "edited_d.py", "rate = (\n")
    for _ in range(2):
        output = run(kernel, "print(edited_d.rate)")
        assert output.error is not None
        assert output.error[0] == "ShippingError"
        assert output.error[1].startswith("the module edited_d has changed and cannot be reloaded on the workers: Syn")
        assert not _line(output)
    _edit(folder, "edited_d.py", "rate = 3\n")
    assert done(kernel, "print(edited_d.rate)").stdout == "3\n"


def test_a_model_of_an_edited_module_trains_with_the_new_code(kernel, folder):
    text = (
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = torch.nn.Linear(2, 1)\n    def forward(self, x): return self.layer(x) * {}\n"
    )
    _edit(folder, "edited_e.py", text.format(1))
    setup(
        kernel,
        "import torch\nfrom edited_e import Net\nnet = Net()\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "data = torch.ones(4, 2)",
    )
    body = (
        "before = net.layer(data).mean().item()\nout = net(data).mean()\nratio = out.item() / before\nout.backward()\n"
        "optimizer.step()\noptimizer.zero_grad()\nafter = net.layer.weight.tolist()"
    )
    done(kernel, body)
    assert kernel.value("round(ratio, 3)") == 1
    _edit(folder, "edited_e.py", text.format(2))
    done(kernel, body)
    assert kernel.value("(round(ratio, 3), after == net.layer.weight.tolist())") == (2, True)


def test_autoreload_in_the_notebook_is_followed(kernel, folder):
    _edit(folder, "edited_f.py", "def read(): return 'old'\n")
    if kernel.run("%load_ext autoreload").error is not None:
        pytest.skip("IPython 7 cannot load autoreload on Python 3.12 and newer")
    setup(kernel, "%autoreload 2")
    setup(kernel, "from edited_f import read\nheld = [read]")
    done(kernel, "found = read(), held[0]()")
    _edit(folder, "edited_f.py", "def read(): return 'new'\n")
    output = done(kernel, "found = read(), held[0]()")
    assert _line(output) == "reloaded on the workers: edited_f"
    assert kernel.value("(found, read(), held[0]())") == (("new", "new"), "new", "new")
    setup(kernel, "%autoreload 0\n%unload_ext autoreload")


def test_a_leftover_that_cannot_be_copied_is_left_out_where_the_cell_can_start_without(kernel):
    setup(kernel, "bar = (i for i in range(3))\nnext(bar)\nflag = False")
    body = "for i in range(2):\n    bar = open('/dev/null')\n    bar.close()\nclosed = bar.closed"
    output = done(kernel, body)
    assert any(text.startswith("left out: `bar` (builtins.generator)") for text in output.texts)
    assert kernel.value("closed") is True
    assert not any("left out" in text for text in done(kernel, "for i in range(2):\n    bar = i\n    bar + 1").texts)
    setup(kernel, "bar = (i for i in range(3))\nnext(bar)")
    assert done(kernel, "if flag: next(bar)").texts[-1].startswith("left out: `bar`")
    output = run(kernel, "if not flag: next(bar)")
    assert output.error is not None
    assert output.error[0] == "NameError", "and never the value that an earlier cell had"
    assert output.texts[-1].startswith("left out: `bar`")
    output = run(kernel, "next(bar)")
    assert output.error is not None
    assert output.error[0] == "ShippingError"


def test_leftovers_of_loops_are_not_listed_and_live_ones_are(kernel):
    setup(kernel, "from tqdm import tqdm\nimport threading")
    output = done(
        kernel,
        "import sys\nfor i in (bar := tqdm(range(2), file=sys.stderr)): pass\n"
        "with open('/dev/null') as file: pass\nover = (i for i in ())\nlist(over)\nrows = open('/dev/null', 'w')",
    )
    assert [text for text in output.texts if "stayed" in text] == [
        "stayed on the workers: rows (TextIOWrapper cannot be copied (TypeError))"
    ]
    done(kernel, "rows.close()")
    output = done(kernel, "live = (i for i in range(3))\nfirst = next(live)\nlock = threading.local()")
    assert "live (generator cannot be copied" in output.texts[-1]
    assert "lock (_local cannot be copied" in output.texts[-1]
    assert done(kernel, "print(next(live))").stdout == "1\n"


def test_an_ended_iterator_of_a_loader_is_not_compared_by_its_parts(kernel):
    setup(
        kernel,
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "model = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "drawn = torch.Generator().manual_seed(4)\n"
        "loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4, shuffle=True, generator=drawn)",
    )
    train = "for (x,) in loader:\n    model(x).sum().backward()\n    optimizer.step()"
    done(kernel, train)
    done(kernel, "batches = iter(loader)\nfirst = next(batches)")
    done(kernel, "rest = list(batches)")
    for _ in range(2):
        assert not any("batches" in text for text in done(kernel, train).texts)
    assert kernel.value("(len(rest), list(batches))") == (1, [])


def test_iterators_in_their_course_are_listed_and_ended_ones_come_back(kernel):
    setup(
        kernel,
        "import csv, torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)\nmodel = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nbatches = iter(loader)",
    )
    train = "for (x,) in {}:\n    model(x).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    body = (
        train.format("loader")
        + "batches = iter(loader)\nfirst = next(batches)\nnumbered = enumerate(loader)\nnext(numbered)"
    )
    output = done(kernel, body)
    assert "stayed on the workers: batches (" in output.texts[-1]
    assert (
        "numbered (enumerate cannot be copied (TypeError); the next cell on the workers continues" in output.texts[-1]
    )
    assert done(kernel, "print(len(list(batches)), len(list(numbered)))").stdout == "3 3\n"
    ended = "with open('/dev/null') as file: rows = csv.reader(file)\nover = iter(loader)\n" + train.format("over")
    assert not any("stayed" in text for text in done(kernel, ended).texts)
    assert kernel.value("list(over)") == []
