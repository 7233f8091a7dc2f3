"""Cells as people write them, in a real kernel on two worker processes."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from tests.notebook.cells import done, setup

MAGIC = "%%accelerate --cpus 2\n"


def test_names_go_out_and_come_back(kernel):
    kernel.run(
        "import math\nscale = 3\ndef helper(value):\n    return math.sqrt(value) * scale\nseen = []\nsame = seen"
    )
    done(kernel, "result = helper(16)\nseen.append(result)\nfresh = {'a': [1, 2]}")
    assert kernel.value("(result, seen, same is seen, fresh)") == (12.0, [12.0], True, {"a": [1, 2]})


def test_functions_that_a_cell_imports_come_back_as_they_are(kernel):
    done(kernel, "from os import remove\nfrom torch import save, zeros\nfrom torch.nn.utils import clip_grad_norm_")
    kernel.run("import os, torch")
    assert kernel.value("(remove is os.remove, save is torch.save, zeros is torch.zeros)") == (True, True, True)
    assert kernel.value("clip_grad_norm_ is torch.nn.utils.clip_grad_norm_") is True


def test_a_function_sees_names_that_are_bound_later(kernel):
    kernel.run("rate = 1\ndef read_rate():\n    return rate")
    done(kernel, "rate = 7\nanswer = read_rate()")
    assert kernel.value("(rate, answer, read_rate())") == (7, 7, 7)


def test_classes_defined_in_cells_go_out_and_come_back(kernel):
    kernel.run(
        "class Point:\n    def __init__(self, x):\n        self.x = x\n"
        "    def double(self):\n        return self.x * 2\np = Point(4)"
    )
    done(kernel, "p.x += 1\nq = Point(p.double())")
    assert kernel.value("(p.x, q.x, type(q) is Point)") == (5, 10, True)


def test_workers_keep_their_own_values(kernel):
    done(kernel, "mine = accelerator.process_index")
    output = done(kernel, "total = accelerator.reduce(__import__('torch').tensor(mine))\nprint(int(total))")
    assert output.stdout == "1\n"


def test_a_name_changed_in_the_notebook_is_sent_again(kernel):
    kernel.run("data = [1, 2, 3]")
    assert done(kernel, "print(sum(data))").stdout == "6\n"
    kernel.run("data.append(10)")
    assert done(kernel, "print(sum(data))").stdout == "16\n"


def test_a_name_to_pull_that_the_cell_does_not_bind_is_named(kernel):
    output = done(kernel, "here = 1", "--cpus 2 --pull here,absent")
    assert output.texts[-1] == "--pull absent: after the cell there is no such name"
    assert "%accelerate set: give lr=RATE" in str(kernel.run("%accelerate set").error)


def test_large_values_stay_until_they_are_pulled(kernel):
    output = done(kernel, "import numpy\nbig = numpy.ones(10_000_000)")
    assert any("big (76.3 MiB is large) · `%accelerate pull big` fetches" in text for text in output.texts)
    assert kernel.value("'big' in globals()") is False
    assert done(kernel, "print(big.sum())").stdout == "10000000.0\n"
    assert "pulled big" in kernel.run("%accelerate pull big").stdout
    assert kernel.value("float(big.sum())") == 10_000_000.0


def test_value_of_the_last_expression_and_rich_display(kernel):
    output = done(kernel, "from IPython.display import HTML, display\ndisplay(HTML('<b>bold</b>'))\n{'answer': 42}")
    assert [data.get("text/html") for data in output.displays[1:2]] == ["<b>bold</b>"]
    assert output.texts[2] == "{'answer': 42}"
    assert len(done(kernel, "42;").displays) == 1
    done(kernel, "import numpy\nnumpy.float32(0.25)")
    assert kernel.value("float(_)") == 0.25


def test_a_value_that_displays_itself_is_displayed_once(kernel):
    body = "class Own:\n    def _ipython_display_(self): print('shown')\nOwn()"
    output = done(kernel, body)
    assert (output.stdout, len(output.displays)) == ("shown\n", 1)  # the receipt


def test_pictures_of_matplotlib_are_shown(kernel):
    output = done(kernel, "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
    assert any("image/png" in data for data in output.displays)


def test_figures_have_the_notebooks_formats(kernel):
    body = "import matplotlib.pyplot as plt\nfigure, axes = plt.subplots()\nplt.show()"
    setup(kernel, "%matplotlib inline\n%config InlineBackend.figure_format = 'svg'")
    assert "image/svg+xml" in done(kernel, body).displays[1]
    setup(kernel, "%config InlineBackend.figure_format = 'png'")
    assert "image/png" in done(kernel, body).displays[1]


def test_all_values_are_shown_if_the_notebook_shows_all(kernel):
    shown = "get_ipython().ast_node_interactivity = {!r}"
    setup(kernel, shown.format("all"))
    assert done(kernel, "1 + 1\n2 + 1\nx = 4").texts[1:] == ["2", "3"]
    setup(kernel, f"x = 1\n{shown.format('last_expr')}")
    assert done(kernel, "1 + 1\n2 + 1").texts[1:] == ["3"]


def test_values_are_shown_with_the_precision_of_the_notebook(kernel):
    setup(kernel, "%precision 3")
    assert done(kernel, "2 / 3").texts[1:] == ["0.667"]
    done(kernel, "%precision 2")
    assert kernel.run("2 / 3").result == "0.67"
    setup(kernel, "%precision")


def test_functions_that_stay_in_one_process_are_named(kernel):
    register = "import logging\ndef keep_all(record): return True\nlogging.getLogger('own').addFilter(keep_all)"
    assert any("filter keep_all of the logger 'own', which the cell" in text for text in done(kernel, register).texts)
    setup(kernel, register.replace("keep_all", "keep_some"))
    texts = done(kernel, "1").texts
    assert any("filter keep_some of the logger 'own', which the notebook" in text for text in texts)
    assert not any("keep" in text for text in done(kernel, "1").texts)


def test_a_last_value_that_stays_on_the_workers_says_where_it_is(kernel):
    setup(kernel, "7")
    done(kernel, "import threading\nthreading.Event()")
    output = kernel.run("_.is_set()")
    assert output.error is not None
    assert "of type Event, stayed on the workers: bind it to a name" in output.error[1]


def test_progress_bars_stay_one_bar(kernel):
    output = done(kernel, "from tqdm import tqdm\nfor _ in tqdm(range(100)): pass")
    assert "100%" in output.stderr
    assert "\n" not in output.stderr.strip()


def test_magics_shell_commands_and_await_work(kernel):
    output = done(kernel, "import asyncio\nawait asyncio.sleep(0)\n!echo from the shell\n%env HOME")
    assert "from the shell" in output.stdout.splitlines()[0]


def test_aliases_of_magics_work_and_magics_of_ipython_stay_as_they_are(kernel):
    setup(kernel, "%alias_magic once timeit -p '-n 1 -r 1'")
    done(kernel, "counts = []\n%once counts.append(1)\nlast = len(counts)")
    assert kernel.value("(counts, last)") == ([1], 1)
    setup(kernel, "from accel_nb.notebook.cells.own_magics import replace_magics\nshell = get_ipython()")
    code = "get_ipython().run_line_magic('psource', 'len')\n"
    assert kernel.value(f"replace_magics({code!r}, shell, {{}})") == code


def test_code_detects_the_notebook_by_the_name_of_its_shell(kernel):
    done(kernel, "def is_notebook():\n    return get_ipython().__class__.__name__\nname = is_notebook()")
    assert kernel.value("[name, is_notebook()]") == ["ZMQInteractiveShell"] * 2


def test_libraries_detect_the_notebook_by_the_kernel_of_its_shell(kernel):
    done(kernel, "found = hasattr(get_ipython(), 'kernel')")
    assert kernel.value("found") is True, "pandas shows other columns in a terminal"


def test_modules_with_the_name_of_a_library_may_lack_its_functions(kernel, tmp_path):
    setup(kernel, "import sys, types\nsys.modules['cv2'] = cv2 = types.ModuleType('cv2')")
    done(kernel, "import sys, types\nsys.modules['cv2'] = types.ModuleType('cv2')")
    done(kernel, f"with open({str(tmp_path / 'written.txt')!r}, 'w') as file:\n    count = file.write('text')")
    assert kernel.value("count") == 4
    done(kernel, "del sys.modules['cv2']")
    setup(kernel, "del sys.modules['cv2'], cv2")


def test_times_and_progress_bars_are_no_difference_between_ranks(kernel):
    output = done(kernel, "import time\nprint(f'took {time.perf_counter()} s')\n%time sum(range(9))")
    assert output.texts[1:] == ["36"], "only the value of the last line follows the receipt"
    bar = "from tqdm import tqdm\nfor number in tqdm(range(3000)):\n    if number % 1000 == 0: print(number)"
    assert done(kernel, bar).texts[1:] == []
    assert done(kernel, "import os\nprint('x' * os.getpid())").texts[1:] == [
        "rank 1 printed 1 line: `%accelerate logs 1`"
    ]


def test_other_ranks_are_folded_and_shown_on_demand(kernel):
    body = "print('rank', accelerator.process_index)"
    output = done(kernel, body)
    assert output.stdout == "rank 0\n"
    assert output.texts[-1] == "rank 1 printed 1 line: `%accelerate logs 1`"
    assert "rank 1" in kernel.run("%accelerate logs 1").stdout
    output = done(kernel, body, "--cpus 2 --show-ranks all")
    assert sorted(output.stdout.splitlines()) == ["[rank 0] rank 0", "[rank 1] rank 1"]
    assert len(done(kernel, "print('same')").displays) == 1


def test_a_cell_can_run_on_some_ranks_only(kernel):
    output = done(kernel, "print(accelerator.process_index)", "--cpus 2 --ranks 1")
    assert output.stdout == "1\n"


def test_a_cell_on_some_ranks_computes_writes_and_runs_commands_by_itself(kernel, tmp_path):
    setup(
        kernel,
        "import subprocess, torch\nmodel = torch.nn.Linear(2, 1)\ndata = torch.ones(16, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nloader = torch.utils.data.DataLoader(data, 8)",
    )
    flags = "--cpus 2 --ranks 1 --timeout 60"
    read = "with torch.no_grad(): print(optimizer.param_groups[0]['lr'], *(model(x).shape for x in loader))"
    assert done(kernel, read, flags).stdout == "0.1 torch.Size([8, 1]) torch.Size([8, 1])\n"
    done(kernel, "model(data).mean().backward()\noptimizer.step()\noptimizer.zero_grad()")
    assert done(kernel, read, flags).stdout == "0.1 torch.Size([8, 1]) torch.Size([8, 1])\n"
    path = tmp_path / "text"
    done(kernel, f"with open({str(path)!r}, 'a') as file: file.write('written once')", "--cpus 3 --ranks 1,2")
    assert path.read_text() == "written once"
    assert done(kernel, "print(subprocess.check_output(['echo', 'run']))", flags).stdout == "b'run\\n'\n"


@pytest.mark.parametrize("body", ["", "\n\n", "# only a comment\n# and another"])
def test_empty_cells_do_nothing(kernel, body):
    output = done(kernel, body)
    assert (output.stdout, output.displays) == ("", [])


def test_no_return_leaves_the_notebook_alone(kernel):
    kernel.run("untouched = 1")
    done(kernel, "untouched = 2", "--cpus 2 --no-return")
    assert kernel.value("untouched") == 1


def test_dry_run_starts_nothing(kernel):
    output = done(kernel, "1/0", "--cpus 3 --precision bf16 --dry-run")
    assert "3 workers: 3 x cpu" in output.stdout
    assert "precision = bf16 from --precision bf16 (flags)" in output.stdout


def test_pool_follows_the_number_of_workers(kernel):
    assert done(kernel, "print(accelerator.num_processes)", "--cpus 3").stdout == "3\n"
    assert done(kernel, "print(accelerator.num_processes)", "--cpus 1").stdout == "1\n"
    assert done(kernel, "print(accelerator.num_processes)").stdout == "2\n"


def test_workers_look_like_torchrun_ranks(kernel):
    body = (
        "import os, torch.distributed as dist\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], dist.get_world_size())"
    )
    assert done(kernel, body).stdout == "0 2 2\n"


def test_line_magics_answer(kernel):
    assert "pool: ready" in kernel.run("%accelerate status").stdout
    assert "cores" in kernel.run("%accelerate doctor").stdout
    assert "2 workers" in kernel.run("%accelerate plan --cpus 2").stdout
    assert "precision" in kernel.run("%accelerate config --precision bf16").stdout
    assert '"stage": 3' in kernel.run("%accelerate config deepspeed --zero-stage 3").stdout
    assert "sent with the next cell that uses it\n" in kernel.run("x = 1\n%accelerate push x").stdout
    assert "workers ended" in kernel.run("%accelerate restart").stdout
    assert done(kernel, "print('again')").stdout == "again\n"


def test_plan_shows_what_each_way_takes_and_starts_nothing(kernel):
    made = kernel.run(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "planned = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 2))\n"
        "pairs = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(2, (64,))), batch_size=32)"
    )
    assert made.error is None, made.traceback
    before = kernel.run("%accelerate status").stdout
    plan = kernel.run("%accelerate plan planned --data pairs --cpus 2").stdout
    assert "batch 32 = 2 x 16" in plan
    assert "-> ddp (--strategy ddp): the simplest way fits" in plan
    assert kernel.run("%accelerate status").stdout == before
    elsewhere = kernel.run("%accelerate plan planned --data pairs --gpus 8 --memory 24GiB").stdout
    assert elsewhere.startswith("Sequential: 706 parameters")
    assert "did you mean planned?" in str(kernel.run("%accelerate plan planed").error)


def test_metrics_of_both_workers_are_served_on_loopback_while_asked_for(kernel):
    step = (
        "import torch\nnet = torch.nn.Linear(1, 1)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for x in torch.utils.data.DataLoader(torch.ones(12, 1), batch_size=4):\n"
        "    net(x).sum().backward()\n    opt.step()\n    opt.zero_grad()"
    )
    output = done(kernel, step, "--cpus 2 --metrics.port 0")
    [line] = [text for text in output.texts if text.startswith("metrics at http://127.0.0.1:")]
    with urllib.request.urlopen(line.removeprefix("metrics at "), timeout=10) as answer:
        text = answer.read().decode()
    for rank in (0, 1):
        assert f'accel_nb_steps_total{{rank="{rank}"}} 3.0' in text
        assert f'accel_nb_samples_total{{rank="{rank}"}} 6.0' in text
    done(kernel, "pass")  # without the flag nothing listens any more
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(line.removeprefix("metrics at "), timeout=10)


def test_unload_ends_the_workers_and_load_brings_them_back(kernel):
    done(kernel, "pass")
    assert kernel.run("%unload_ext accel_nb").error is None
    assert kernel.value("__import__('psutil').Process().children()") == []
    assert kernel.run("%load_ext accel_nb").error is None
    assert done(kernel, "print('here')").stdout == "here\n"


def test_code_for_the_well_known_package_runs_in_a_cell(kernel):
    output = done(
        kernel,
        "import accel_nb.compat\naccel_nb.compat.install()\nfrom accelerate import Accelerator\n"
        "from accelerate.utils import gather_object\nown = Accelerator()\n"
        "print(gather_object([own.process_index]), own.distributed_type)",
    )
    assert output.stdout == "[0, 1] MULTI_CPU\n"
    assert kernel.value("'accelerate' in __import__('sys').modules") is False
