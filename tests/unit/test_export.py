"""Export of a notebook to a script: its text, the detection of roles, and errors."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from accel_nb.cli.main import main
from accel_nb.config.layers import read_file
from accel_nb.errors import ConfigError
from accel_nb.notebook.export.script import ExportedScript, NotebookCell, executed_cells, export_notebook, write_script

SETUP = """\
import torch
from torch import nn, optim
from torch.utils.data import DataLoader

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(4, 1).to(device)
optimizer = optim.SGD(model.parameters(), lr=0.1)
scheduler = optim.lr_scheduler.StepLR(optimizer, 2)
loader = DataLoader(torch.ones(8, 4), batch_size=4)
"""
LOOP = """\
%%accelerate --cpus 2 --accumulate 2 --no-panel
for epoch in range(2):  # é: offsets are those of bytes
    for x in loader:
        loss = model(x.cuda()).mean(); loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    print("epoch", epoch)
"""


def made(*texts: str, layers: tuple = ()) -> ExportedScript:
    cells = [NotebookCell(number, "code", text) for number, text in enumerate(texts, 1)]
    return export_notebook(cells, layers, title="some.ipynb", script="out/train.py")


def body(*texts: str) -> str:
    """Return a script without what stands above its first cell."""
    return made(*texts).script.partition('with_name("train.yaml"))\n\n')[2]


def test_a_plain_notebook_reads_like_a_script(tmp_path: Path):
    heading = NotebookCell(3, "markdown", "## Train\nSome words.")
    cells = [
        NotebookCell(1, "code", "%load_ext accel_nb"),
        NotebookCell(2, "code", SETUP),
        heading,
        NotebookCell(4, "code", LOOP),
    ]
    cells += [NotebookCell(5, "code", "%accelerate status\ntorch.save(model.state_dict(), 'w.pt')\nmodel.weight")]
    exported = export_notebook(cells, (), title="notes/some.ipynb", script="train.py")
    assert (
        exported.script
        == '''\
"""Trains as some.ipynb does; made from it by accel-nb export. The options are in train.yaml.

    accel-nb launch --cpus 2 train.py
    torchrun --nproc-per-node 2 train.py
"""

from pathlib import Path

import torch
from accel_nb import Accelerator
from torch import nn, optim
from torch.utils.data import DataLoader

accelerator = Accelerator(config=Path(__file__).with_name("train.yaml"))

torch.manual_seed(0)
device = accelerator.device.type
model = nn.Linear(4, 1).to(device)
optimizer = optim.SGD(model.parameters(), lr=0.1)
scheduler = optim.lr_scheduler.StepLR(optimizer, 2)
loader = DataLoader(torch.ones(8, 4), batch_size=4)

# Train
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
for epoch in range(2):  # é: offsets are those of bytes
    for x in loader:
        loss = model(x.to(accelerator.device)).mean(); accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    accelerator.print("epoch", epoch)

accelerator.save(model.state_dict(), 'w.pt')
'''
    )
    (tmp_path / "train.yaml").write_text(exported.options)
    assert dict(read_file(tmp_path / "train.yaml").values) == {"accumulate": 2, "batch": "global"}


TRAIN = "%%accelerate --cpus 2\nmodel(data[0]).sum().backward()\noptimizer.step()"


@pytest.mark.parametrize(
    "statement",
    [
        "import os, sys\nsys.path.insert(0, 'src')",
        "import os\nos.environ['KEY'] = '1'",
        "import os\nos.environ.setdefault('KEY', '1')",
        "from dotenv import load_dotenv\nload_dotenv()",
        "import matplotlib\nmatplotlib.rcParams = {}",
        "if True:\n    from own import *",
        "from own import *",
    ],
)
def test_an_import_stays_below_what_it_may_depend_on(statement: str):
    script = made(f"{statement}\nfrom library import part", SMALL, TRAIN).script
    last = statement.splitlines()[-1]
    assert script.index("from pathlib") < script.index(last) < script.index("from library import part")
    assert script.index("from library import part") < script.index("import torch") < script.index("model, data =")


def test_an_import_of_a_name_that_is_bound_before_stays_in_its_place():
    script = made("from tqdm import tqdm\na = tqdm", "from tqdm.auto import tqdm\nb = tqdm", SMALL, TRAIN).script
    assert script.index("from tqdm import") < script.index("a = tqdm") < script.index("from tqdm.auto import tqdm")
    assert script.index("import torch\n") < script.index("a = tqdm")
    script = made("tqdm = None\nfrom tqdm import tqdm", "import os.path\nx = 1\nimport os", SMALL, TRAIN).script
    assert script.index("tqdm = None") < script.index("from tqdm import")
    assert script.index("import os\n") < script.index("x = 1")


def test_a_function_prepares_the_objects_that_it_creates():
    function = """\
def train(model, data, *, epochs):
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(epochs):
        for x in data:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
    text = body(SETUP, function, "%%accelerate\ntrain(model, data=loader, epochs=2)")
    assert "    model, optimizer, data = accelerator.prepare(model, optimizer, data)\n    for epoch" in text
    assert "accelerator.backward(model(x).mean())" in text
    assert text.endswith("\n\n\ntrain(model, data=loader, epochs=2)\n")


def test_trained_arguments_of_a_function_are_prepared_by_its_caller():
    function = """\
def epoch(net, opt, batches):
    for x in enumerate(batches):
        net(x).mean().backward()
        opt.step()
        opt.zero_grad()

def train():
    epoch(model, optimizer, loader)
"""
    text = body(SETUP, function, "%%accelerate\nfor _ in range(2):\n    train()", "%%accelerate\ntrain()")
    assert "\nmodel, optimizer, loader = accelerator.prepare(model, optimizer, loader)\nfor _ in range(2):" in text
    assert text.count("prepare(") == 1
    assert text.endswith(
        'synchronize_rng_states(["torch", "numpy", "python"])\naccelerator.note_equal_rng()\ntrain()\n'
    )


SMALL = """\
import torch
from torch import nn
model, data = nn.Linear(4, 1), [torch.ones(8, 4)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
PREPARE = "model, optimizer = accelerator.prepare(model, optimizer)"


@pytest.mark.parametrize(
    ("line", "rewritten"),
    [
        ("model(data[0]).sum().backward()", f"{PREPARE}\naccelerator.backward(model(data[0]).sum())"),
        ("model.train(); model(data[0]).sum().backward()", f"model.train(); {PREPARE}; accelerator.backward(model("),
        ("if True:\n\tx = 1\n\tmodel(data[0]).sum().backward()", f"{PREPARE}\nif True:\n\tx = 1\n\taccelerator.b"),
        ("(model(data[0]) * 2\n).sum().backward(retain_graph=True)", "* 2\n).sum(), retain_graph=True)"),
        ("((model(data[0].to('cuda:0')) - data[0].cuda(0)).sum()).backward()", (
            "accelerator.backward(((model(data[0].to(accelerator.device)) - data[0].to(accelerator.device)).sum()))"
        )),
        ("x = (data[0] / 255).cuda(non_blocking=True)\nmodel(x).sum().backward()", (
            "x = (data[0] / 255).to(accelerator.device, non_blocking=True)"
        )),
        ("with torch.autocast('cuda'):\n    model(data[0]).sum().backward()", "autocast(accelerator.device.type):"),
        ("d = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\nmodel(data[0]).sum().backward()", (
            "d = accelerator.device\n"
        )),
        ("d, n = f'cuda:{0}', f'cuda: {1}'\nprint('cuda: on', d)\nmodel(data[0]).sum().backward()", (
            "d, n = str(accelerator.device), f'cuda: {1}'\naccelerator.print('cuda: on', d)"
        )),
    ],
)  # fmt: skip
def test_a_training_cell_is_rewritten(line: str, rewritten: str):
    script = made(SMALL, f"%%accelerate --cpus 2\n{line}\noptimizer.step()").script
    compile(script, "train.py", "exec")
    assert PREPARE in script
    assert rewritten in script


def test_a_function_that_is_indented_by_tabs_is_rewritten():
    function = (
        "def train(m):\n\topt = torch.optim.SGD(m.parameters(), lr=0.1)\n\tm(data[0]).sum().backward()\n\topt.step()"
    )
    script = made(SMALL, f"%%accelerate --cpus 2\n{function}\ntrain(model)").script
    compile(script, "train.py", "exec")
    assert "\n\tm, opt = accelerator.prepare(m, opt)\n\taccelerator.backward(m(data[0]).sum())" in script


def test_a_print_of_the_notebooks_own_is_left():
    script = made(SMALL, "%%accelerate --cpus 2\nfrom rich import print\nmodel(data[0]).sum().backward()\n"
                         "optimizer.step()\nprint('done')").script  # fmt: skip
    assert "\nprint('done')" in script


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("Accelerator()", "Accelerator(config=C)"),
        ("Accelerator(\n    mixed_precision='bf16',\n)", "Accelerator(\n    mixed_precision='bf16', config=C,\n)"),
        ("Accelerator(cpu=(True))", "Accelerator(cpu=(True), config=C)"),
    ],
)
def test_an_own_accelerator_gets_the_options(call: str, expected: str):
    cell = f"%%accelerate --cpus 2\nfrom accel_nb import Accelerator\naccelerator = {call}\n{PREPARE}"
    script = made(SMALL, f"{cell}\naccelerator.backward(model(data[0]).sum())\noptimizer.step()").script
    compile(script, "train.py", "exec")
    assert expected.replace("=C", '=Path(__file__).with_name("train.yaml")') in script


@pytest.mark.parametrize(
    "made_by",
    [
        "optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "weights = [p for p in model.parameters() if p.requires_grad]\noptimizer = torch.optim.SGD(weights, lr=0.1)",
        "model, optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)",
    ],
)
def test_the_model_of_an_optimizer_is_found(made_by: str):
    model = "import torch\nfrom torch import nn\nmodel = nn.Linear(4, 1)"
    cell = "%%accelerate --cpus 2\nmodel(torch.ones(8, 4)).sum().backward()\noptimizer.step()\noptimizer.zero_grad()"
    assert PREPARE in made(model, made_by, cell).script


def test_an_optimizer_without_a_model_is_refused():
    with pytest.raises(ConfigError, match="cannot detect what it trains"):
        made("import torch\nw = torch.ones(2, requires_grad=True)\noptimizer = torch.optim.SGD([w], lr=0.1)",
             "%%accelerate --cpus 2\nw.sum().backward()\noptimizer.step()\noptimizer.zero_grad()")  # fmt: skip


def test_a_class_that_trains_is_refused():
    trainer = "class Trainer:\n    def fit(self):\n        model(data[0]).sum().backward()\n        optimizer.step()"
    with pytest.raises(ConfigError, match="class Trainer trains"):
        made(SMALL, trainer, "%%accelerate --cpus 2\nTrainer().fit()")


def test_an_explicit_cell_is_left_as_written():
    cell = "%%accelerate --seed 3\nmodel, loader = accelerator.prepare(model, loader)\nprint(model)"
    text = body(SETUP, cell)
    assert text.endswith("set_seed(3)\nmodel, loader = accelerator.prepare(model, loader)\nprint(model)\n")
    own = "%%accelerate --precision bf16\nfrom accel_nb import Accelerator\naccelerator = Accelerator(cpu=True)"
    script = made(SETUP, own)
    assert 'accelerator = Accelerator(cpu=True, config=Path(__file__).with_name("train.yaml"))' in script.script
    assert script.script.count("= Accelerator(") == 1
    assert "precision: bf16" in script.options


def test_a_seed_is_added_if_there_is_none():
    text = made(SETUP.replace("torch.manual_seed(0)", ""), LOOP).script
    assert "from accel_nb import Accelerator, set_seed\n" in text
    assert text.index("set_seed(0)  #") < text.index("model = nn.Linear")


def test_magics_are_left_out_and_reported():
    exported = made("!pip install x\n%matplotlib inline\ny = 1", "%%bash\nls", "%%time\nz = 2", SETUP, LOOP)
    assert exported.left_out == ("cell 1: !pip install x", "cell 1: %matplotlib inline", "cell 2, which is %%bash")
    assert "y = 1" in exported.script
    assert "z = 2" in exported.script


REFUSED = {
    "trains in the notebook itself": [SETUP, LOOP.partition("\n")[2], LOOP],
    r"cells 2 and 3 train with different options \(cpus\)": [SETUP, LOOP, LOOP.replace("--cpus 2", "--cpus 3")],
    r"cells 2 and 3 train with different options \(accumulate\)": [SETUP, LOOP, LOOP.replace("--accumulate 2", "")],
    r"runs on some ranks only \(--ranks\)": [SETUP, LOOP.replace("--cpus 2", "--cpus 2 --ranks 1")],
    "no cell begins with %%accelerate": [SETUP],
    "cell 1 is not Python": ["for in x"],
    "cell 2: --gpu is not a flag; did you mean --gpus": [SETUP, "%%accelerate --gpu 2\nprint(1)"],
    "cell 3 iterates over loader, which another cell trains with": [SETUP, LOOP, "sum(x for x in loader)"],
    "cell 2: cannot detect what it trains": [SETUP, "%%accelerate\nself.fit(); loss.backward(); self.optimizer.step()"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_cells_that_cannot_be_one_script_raise(message: str):
    with pytest.raises(ConfigError, match=message):
        made(*REFUSED[message])


def test_the_command_writes_two_files_and_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in (SETUP, LOOP)])
    nbformat.write(notebook, "some.ipynb")
    assert main(["export", "some.ipynb", "train.py"]) == 0
    assert capsys.readouterr().out == "wrote train.py and train.yaml\n"
    assert main(["export", "some.ipynb", "train.py"]) == 2
    assert "train.py, train.yaml: already exists and was not changed" in capsys.readouterr().err
    assert main(["export", "--force", "some.ipynb", "train.py"]) == 0
    assert main(["export", "some.ipynb", "train.txt"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some.ipynb", "train.py", "train.yaml"]
    with pytest.raises(ConfigError, match="cannot be written"):
        write_script(made(SETUP, LOOP), "nowhere/train.py", replaces=False)


def test_executed_cells_are_ordered_by_their_last_runs():
    assert [source.text for source in executed_cells(["", "a = 1", "b = 2", "a = 1"])] == ["b = 2", "a = 1"]
