"""What a cell finds around it on the workers: variables, modules, and names that could not be sent."""

from __future__ import annotations

from tests.notebook.test_cells import done, run
from tests.notebook.test_state import setup


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


def test_a_leftover_that_cannot_be_copied_is_left_out_where_the_cell_can_start_without(kernel):
    setup(kernel, "bar = (i for i in range(3))\nflag = False")
    body = "for i in range(2):\n    bar = open('/dev/null')\n    bar.close()\nclosed = bar.closed"
    output = done(kernel, body)
    assert any(text.startswith("left out: `bar` (builtins.generator)") for text in output.texts)
    assert kernel.value("closed") is True
    assert not any("left out" in text for text in done(kernel, "for i in range(2):\n    bar = i\n    bar + 1").texts)
    setup(kernel, "bar = (i for i in range(3))")
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
        "stayed on the workers: rows (TextIOWrapper cannot be copied (PicklingError))"
    ]
    done(kernel, "rows.close()")
    output = done(kernel, "live = (i for i in range(3))\nlock = threading.Lock()")
    assert "live (generator cannot be copied" in output.texts[-1]
    assert "lock (lock cannot be copied" in output.texts[-1]
    assert done(kernel, "print(next(live))").stdout == "0\n"
