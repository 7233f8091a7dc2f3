"""What cells set on imported modules and classes, scripts of %run, and writers of event files."""

from __future__ import annotations

import pytest

from tests.notebook.cells import done, run, setup

OWN_KERNEL = True
"""Modules and classes that the kernel imported are changed."""


@pytest.fixture
def helpers(kernel, tmp_path):
    """A module that the notebook imports."""
    (tmp_path / "accel_nb_helpers.py").write_text(
        "rate = 0.1\noptions = {'clip': 1}\n"
        "class Model:\n    def size(self): return 1\n"
        "def add_to_class(kind):\n    def wrapper(function): setattr(kind, function.__name__, function)\n"
        "    return wrapper\n"
    )
    setup(kernel, f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport accel_nb_helpers as helpers")
    yield
    setup(kernel, "sys.path.pop(0)\ndel sys.modules['accel_nb_helpers'], helpers")


def test_attributes_that_the_notebook_sets_on_modules_and_classes_are_set_on_workers(kernel, helpers):
    setup(kernel, "helpers.rate = 0.5\nhelpers.options['clip'] = 2\nscale = 3")
    setup(kernel, "@helpers.add_to_class(helpers.Model)\ndef forward(self): return self.size() * scale * helpers.rate")
    done(kernel, "found = (helpers.rate, helpers.options, helpers.Model().forward())")
    assert kernel.value("found") == (0.5, {"clip": 2}, 1.5)
    setup(kernel, "helpers.rate = 0.25")
    done(kernel, "found = helpers.Model().forward()")
    assert kernel.value("found") == 0.75


def test_a_method_that_is_put_back_is_the_one_of_before_on_the_other_side_too(kernel, helpers):
    setup(kernel, "plain = helpers.Model.size\nhelpers.Model.size = lambda self: 5")
    done(kernel, "found = helpers.Model().size()")
    assert kernel.value("found") == 5
    setup(kernel, "helpers.Model.size = plain")
    done(kernel, "found = helpers.Model().size()")
    assert kernel.value("found") == 1
    done(kernel, "helpers.Model.size = lambda self: 7")
    assert kernel.value("helpers.Model().size()") == 7
    done(kernel, "helpers.Model.size = plain")
    assert kernel.value("(helpers.Model().size(), helpers.Model.size is plain)") == (1, True)


def test_attributes_that_a_cell_sets_on_modules_are_set_in_the_notebook(kernel, helpers):
    done(kernel, "import accel_nb_helpers as helpers\nhelpers.rate = 7\nhelpers.Model.size = lambda self: 5")
    assert kernel.value("(helpers.rate, helpers.Model().size())") == (7, 5)
    done(kernel, "found = (helpers.rate, helpers.Model().size())")
    assert kernel.value("found") == (7, 5)


def test_dictionaries_of_modules_are_changed_in_place_on_both_sides(kernel, helpers):
    setup(kernel, "from accel_nb_helpers import options")
    done(
        kernel,
        "import accel_nb_helpers as helpers\nhelpers.options['clip'] = 9\nhelpers.rate = helpers.options['clip']",
    )
    assert kernel.value("(options, helpers.options is options, helpers.rate)") == ({"clip": 9}, True, 9)
    setup(kernel, "helpers.options['clip'] = 11")
    done(kernel, "from accel_nb_helpers import options\nfound = dict(options)")
    assert kernel.value("found") == {"clip": 11}


def test_an_attribute_of_a_cell_that_cannot_be_returned_is_named(kernel, helpers):
    output = done(kernel, "import threading\nhelpers.guard = threading.local()\nhelpers.rate = 8")
    assert "stayed on the workers: accel_nb_helpers.guard (cannot be copied: TypeError" in output.texts[-1]
    assert kernel.value("(helpers.rate, hasattr(helpers, 'guard'))") == (8, False)


def test_an_attribute_that_cannot_be_sent_is_named_and_costs_nothing_else(kernel, helpers):
    setup(kernel, "import threading\nhelpers.lock = threading.local()\nhelpers.rate = 4")
    output = done(kernel, "found = (helpers.rate, hasattr(helpers, 'lock'))")
    assert kernel.value("found") == (4, False)
    assert any("left out: accel_nb_helpers.lock" in text for text in output.texts)
    output = done(kernel, "found = helpers.rate")
    assert not any("left out" in text for text in output.texts), "reported once"


def test_a_script_of_run_trains_as_the_cell_does(kernel, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from __future__ import annotations\nimport sys\nimport torch\ndef scale(value: Undefined): return value\n"
        "text = 'a\u2028b'\nbatches = torch.utils.data.DataLoader(torch.arange(8.0).reshape(8, 1), batch_size=4)\n"
        "for x in batches:\n    loss = net(x).square().mean()\n    loss.backward()\n"
        "    opt.step()\n    opt.zero_grad()\n"
        "arguments = sys.argv[1:]\n",
        encoding="utf-8",
    )
    build = (
        "import torch\ntorch.set_default_dtype(torch.float64)\ntorch.manual_seed(0)\nnet = torch.nn.Linear(1, 1)\n"
        "opt = torch.optim.SGD(net.parameters(), 0.001)"
    )
    setup(kernel, f"{build}\n%run -i {script} --fast")
    expected = kernel.value("(net.weight.item(), arguments, text, sys.argv, sys.path)")
    setup(kernel, build)
    done(kernel, f"%run -i {script} --fast")
    weight, *others = kernel.value("(net.weight.item(), arguments, text, sys.argv, sys.path)")
    setup(kernel, "torch.set_default_dtype(torch.float32)")
    assert weight == pytest.approx(expected[0], abs=1e-12)
    assert others == [*expected[1:]]
    assert others[0] == ["--fast"]
    setup(kernel, "def later(value: int): pass")
    assert kernel.value("later.__annotations__['value'] is int") is True


def test_a_script_that_is_missing_or_raises_is_an_error_of_the_cell(kernel, tmp_path):
    output = run(kernel, f"%run {tmp_path / 'absent.py'}")
    assert "absent.py" in str(output.error) + output.stderr
    (tmp_path / "raises.py").write_text("raise ValueError('from the script')\n")
    output = run(kernel, f"%run {tmp_path / 'raises.py'}")
    assert "from the script" in str(output.error) + output.stderr


def test_one_writer_of_events_is_used_by_notebook_and_cells(kernel, tmp_path):
    pytest.importorskip("tensorboard", reason="torch's SummaryWriter needs tensorboard")
    setup(
        kernel,
        "from torch.utils.tensorboard import SummaryWriter\n"
        f"writer = SummaryWriter({str(tmp_path)!r})\nwriter.add_scalar('value', 1.0, 0)",
    )
    done(kernel, "writer.add_scalar('value', 2.0, 1)")
    setup(
        kernel,
        "writer.add_scalar('value', 3.0, 2)\nwriter.close()\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        f"events = EventAccumulator({str(tmp_path)!r})\nevents.Reload()\n"
        "values = sorted((item.step, item.value) for item in events.Scalars('value'))",
    )
    assert kernel.value("values") == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_a_backend_of_plots_without_figures_is_the_notebooks(kernel):
    setup(kernel, "import matplotlib\nmatplotlib.use('Agg')")
    output = done(kernel, "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nplt.close()")
    assert not any("image/png" in shown for shown in output.displays)
    setup(kernel, "%matplotlib inline")
    output = done(kernel, "plt.plot([1, 2])\nplt.show()")
    assert any("image/png" in shown for shown in output.displays)
    done(kernel, "matplotlib.use('svg')")
    setup(kernel, "backend = matplotlib.get_backend()\n%matplotlib inline")
    assert kernel.value("backend") == "svg"


def test_the_style_of_plots_and_the_detection_of_anomalies_are_the_notebooks(kernel):
    setup(
        kernel,
        "import matplotlib, torch\nmatplotlib.rcParams['lines.linewidth'] = 7.0\n"
        "torch.autograd.set_detect_anomaly(True)",
    )
    done(kernel, "import matplotlib\nfound = (matplotlib.rcParams['lines.linewidth'], torch.is_anomaly_enabled())")
    assert kernel.value("found") == (7.0, True)
    setup(kernel, "matplotlib.rcParams['lines.linewidth'] = 1.5\ntorch.autograd.set_detect_anomaly(False)")
    done(kernel, "found = (matplotlib.rcParams['lines.linewidth'], torch.is_anomaly_enabled())")
    assert kernel.value("found") == (1.5, False)


def test_cells_run_where_a_module_of_the_notebook_is_not_found(kernel, tmp_path):
    (tmp_path / "accel_nb_gone.py").write_text("SEEN = []\ndef record(item): SEEN.append(item)\n")
    setup(kernel, f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport accel_nb_gone\nsys.path.pop(0)")
    (tmp_path / "accel_nb_gone.py").unlink()
    done(kernel, "found = 3")
    assert kernel.value("found") == 3
    output = run(kernel, "accel_nb_gone.record(1)")
    assert output.error is not None
    assert "accel_nb_gone" in output.traceback
    setup(kernel, "del sys.modules['accel_nb_gone'], accel_nb_gone")


def test_a_module_is_sent_whose_folder_is_not_searched_any_more(kernel, tmp_path):
    (tmp_path / "accel_nb_apart.py").write_text("SEEN = []\ndef record(item): SEEN.append(item)\n")
    setup(kernel, f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport accel_nb_apart\nsys.path.pop(0)")
    done(kernel, "accel_nb_apart.record(1)")
    assert kernel.value("accel_nb_apart.SEEN") == [1]
    setup(kernel, "del sys.modules['accel_nb_apart'], accel_nb_apart")


def test_methods_that_a_package_adds_to_classes_of_another_one_are_there_on_both_sides(kernel, helpers, tmp_path):
    (tmp_path / "pandas" / "core").mkdir(parents=True)
    (tmp_path / "pandas" / "__init__.py").write_text("")
    (tmp_path / "pandas" / "core" / "frame.py").write_text("class DataFrame:\n    def size(self): return 1\n")
    (tmp_path / "accel_nb_progress.py").write_text(
        "import pandas.core.frame\n"
        "def register(factor):\n"
        "    def progress_apply(frame): return frame.size() * factor\n"
        "    pandas.core.frame.DataFrame.progress_apply = progress_apply\n"
    )
    setup(kernel, "import accel_nb_progress, pandas.core.frame\nframe = pandas.core.frame.DataFrame()")
    setup(kernel, "accel_nb_progress.register(2)")
    done(kernel, "found = frame.progress_apply()")
    assert kernel.value("found") == 2
    done(kernel, "accel_nb_progress.register(3)")
    assert kernel.value("frame.progress_apply()") == 3
