"""Who holds what, and in which version: names, models and optimizers over several cells, changes and faults."""

from __future__ import annotations

import pytest

from tests.notebook.cells import done, run, setup

MODEL = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.{optimizer}
data = torch.ones(4, 2)
"""
SGD = "SGD(model.parameters(), lr=0.1)"
STEP = "model(data).pow(2).mean().backward()\noptimizer.step()\noptimizer.zero_grad()\n"
SAME = "print(accelerator.reduce(model.weight.detach().clone(), 'mean').sub(model.weight).abs().max().item() < 1e-7)"

INTERRUPT_AT_THE_END = """
import signal
from accel_nb.notebook.session import post_mortem
here, describe = 2, post_mortem.describe_out_of_memory
def interrupt(*values):
    post_mortem.describe_out_of_memory = describe
    signal.raise_signal(signal.SIGINT)
post_mortem.describe_out_of_memory = interrupt
"""


@pytest.mark.parametrize("optimizer", [SGD, "AdamW(model.parameters(), lr=0.1, fused=True)"])
def test_every_cell_brings_its_training_back(kernel, optimizer):
    setup(kernel, MODEL.format(optimizer=optimizer))
    for _ in range(3):
        setup(kernel, "before = model.weight.detach().clone()")
        done(kernel, f"{STEP}there = model.weight.detach().tolist()")
        assert kernel.value("bool((model.weight != before).all())") is True
        assert kernel.value("model.weight.tolist() == there") is True


def test_a_cell_after_a_death_has_the_notebooks_values_on_every_rank(kernel):
    setup(kernel, MODEL.format(optimizer=SGD))
    body = f"import os\n{STEP}if accelerator.process_index == 1: os._exit(3)\naccelerator.wait_for_everyone()"
    assert run(kernel, body).error is not None
    output = done(kernel, f"{STEP}")
    assert output.error is None
    assert done(kernel, f"accelerator\n{SAME}").stdout == "True\n"


def test_a_worker_that_status_finds_dead_has_the_notebooks_values_after_it(kernel):
    setup(kernel, "there = 1")
    done(kernel, "there")
    session = "get_ipython().magics_manager.registry['AccelerateMagics'].session"
    setup(
        kernel, f"import psutil\nprocess = psutil.Process({session}.status().pids[1])\nprocess.kill(), process.wait(20)"
    )
    assert "rank 1" in kernel.run("%accelerate status").stdout
    assert done(kernel, "print(there)").stdout == "1\n"


def test_values_come_back_if_an_interrupt_arrives_as_the_cell_has_ended(kernel):
    setup(kernel, INTERRUPT_AT_THE_END)
    output = run(kernel, "here = 10")
    assert output.error is not None
    assert output.error[0] == "KeyboardInterrupt"
    assert kernel.value("here") == 10
    assert done(kernel, "print(here)").stdout == "10\n"


def test_training_comes_back_if_the_end_of_the_run_fails(kernel):
    setup(kernel, f"{MODEL.format(optimizer=SGD)}\nbefore = model.weight.detach().clone()")
    fail = "def fail():\n    del accelerator.end_run\n    raise OSError('no space')\naccelerator.end_run = fail\n"
    output = run(kernel, f"{fail}with torch.no_grad(): model.weight += 1")
    assert output.error == ("OSError", "no space")
    assert kernel.value("(model.weight - before).unique().tolist()") == [1.0]
    assert done(kernel, "print((model.weight - before).unique().tolist())").stdout == "[1.0]\n"


def test_prepared_objects_of_an_explicit_cell_stay_prepared_under_other_flags(kernel):
    setup(kernel, MODEL.format(optimizer=SGD))
    done(kernel, "model, optimizer = accelerator.prepare(model, optimizer)")
    step = (
        "x = torch.full((4, 2), 1.0 + accelerator.process_index)\n"
        "accelerator.backward(model(x).pow(2).mean())\noptimizer.step()\noptimizer.zero_grad()\n"
    )
    assert done(kernel, step + SAME).stdout == "True\n"
    assert done(kernel, step + SAME, "--cpus 2 --timeout 60").stdout == "True\n"
    interrupted = "print('go', flush=True)\naccelerator\nwhile True: pass"
    assert run(kernel, interrupted, interrupt_on="go").error is not None
    assert done(kernel, step + SAME).stdout == "True\n"


def test_backward_without_a_prepared_model_is_refused(kernel):
    setup(kernel, MODEL.format(optimizer=SGD))
    output = run(kernel, "from accel_nb import Accelerator\nfresh = Accelerator()\nfresh.backward(model(data).sum())")
    assert output.error is not None
    assert "holds no model" in output.error[1]


def test_a_cell_on_some_ranks_sends_its_names_to_all(kernel):
    setup(kernel, "message = 'first'")
    assert done(kernel, "print(message)", "--cpus 2 --ranks 1").stdout == "first\n"
    setup(kernel, "message = 'second'")
    done(kernel, "print(message)", "--cpus 2 --ranks 1")
    assert done(kernel, "print(message)").stdout == "second\n"


def test_rebinding_in_a_cell_leaves_the_notebooks_old_object_alone(kernel):
    setup(kernel, "losses = [1]\nruns = [losses]")
    done(kernel, "losses = [2, 3]")
    assert kernel.value("(runs, losses)") == ([[1]], [2, 3])


def test_what_a_cell_changes_before_it_binds_the_name_anew_is_changed_in_other_values(kernel):
    setup(
        kernel,
        "import collections\nclass Point: pass\n"
        "numbers, point, chosen, queue = [1], Point(), {1}, collections.deque([1])\n"
        "box = numbers, point, chosen, queue",
    )
    done(
        kernel,
        "numbers.append(2); point.x = [3]; chosen.add(4); queue.append(5)\nnumbers, point = numbers + [6], Point()\n"
        "chosen, queue = set(), None",
    )
    assert kernel.value("(box[0], box[1].x, box[2], list(box[3]))") == ([1, 2], [3], {1, 4}, [1, 5])
    assert kernel.value("(numbers, vars(point), chosen, queue)") == ([1, 2, 6], {}, set(), None)


CACHED = "a = 1; s = 'x'; n = None; t = (); b = True"


@pytest.mark.parametrize(
    "body",
    [
        CACHED,
        "globals().update(a=1, s='x', n=None, t=(), b=True)",
        f"exec({CACHED!r})",
        "bind_all()",
        "for a, s, n, t, b in [(1, 'x', None, (), True)]: pass",
    ],
    ids=["statement", "globals", "exec", "function", "loop"],
)
def test_a_bound_name_comes_back_whatever_the_notebook_has_made_of_it(kernel, body):
    setup(kernel, "def bind_all():\n    global a, s, n, t, b\n    a, s, n, t, b = 1, 'x', None, (), True")
    done(kernel, body)
    for change in ("a = 5; s = 'y'; n = 3; t = (1,); b = 0", "del a, s, n, t, b", "a = b = s = t = n = None"):
        setup(kernel, change)
        done(kernel, body)
        assert kernel.value("(a, s, n, t, b)") == (1, "x", None, (), True), change
    done(kernel, body, "--cpus 2 --no-return")
    setup(kernel, "a = 5")
    done(kernel, "a = 2", "--cpus 2 --no-return")
    assert kernel.value("a") == 5
    done(kernel, "a = 2")
    assert kernel.value("a") == 2


def test_a_name_that_a_cell_sets_to_none_is_none_whatever_its_value_was(kernel):
    setup(kernel, "import torch\nmodel, numbers, box = torch.nn.Linear(1, 1), {1}, [torch.ones(1)]\ndef read(): pass")
    done(kernel, "box.append(model)\nnumbers |= {2}\nread()")
    done(kernel, "box.clear()\nmodel = numbers = read = None")
    assert kernel.value("(model, numbers, read, box)") == (None, None, None, [])


def test_a_cell_finds_no_name_that_the_notebook_has_deleted(kernel):
    done(kernel, "a, b = 1, [2]\ndef read(): return a")
    setup(kernel, "del a")
    done(kernel, "a_is_there = 'a' in globals()")
    assert kernel.value("a_is_there") is False
    for body in ("print(a)", "read()"):
        output = run(kernel, body)
        assert output.error is not None
        assert output.error[0] == "NameError"
    done(kernel, "del b")
    assert kernel.value("'b' in globals()") is False, "and the notebook none that a cell has deleted"


def test_names_that_begin_with_underscores_are_the_users(kernel):
    setup(kernel, "_one, __two, __v = 1, 2, 3\ndef __add(a):\n    return a + __v")
    done(kernel, "__two += _one\n__three = __add(__two)")
    assert (kernel.value("__two"), kernel.value("__three")) == (3, 6)


def test_after_a_reset_the_workers_have_no_old_objects(kernel):
    body = MODEL.format(optimizer=SGD) + STEP
    done(kernel, body + "extra = torch.nn.Linear(1, 1)\nfar = torch.optim.SGD(extra.parameters(), 0.1)")
    setup(kernel, "%reset -f")
    output = done(kernel, "names = sorted(set(globals()) & {'model', 'optimizer', 'data', 'extra', 'far'})\n" + body)
    assert kernel.value("names") == []
    assert "model Linear (3 parameters), optimizer SGD" in output.receipt
    assert "extra" not in output.receipt


def test_a_model_that_another_name_holds_is_the_same_after_its_first_name_is_gone(kernel):
    setup(kernel, MODEL.format(optimizer=SGD) + "nets = [model, torch.nn.Linear(1, 1)]")
    done(kernel, f"for net in nets: pass\nnet = nets[0]\n{STEP}")
    setup(kernel, "net = None\nkept = model\ndel model\nkept.weight.data.fill_(3.0)")
    done(kernel, "before = kept.weight.tolist()")
    assert kernel.value("before") == [[3.0, 3.0]]
    done(
        kernel,
        f"same = kept is nets[0] and optimizer.param_groups[0]['params'][0] is kept.weight\n"
        f"{STEP.replace('model', 'kept')}after = kept.weight.tolist()",
    )
    assert kernel.value("(same, after == kept.weight.tolist() != [[3.0, 3.0]])") == (True, True)


ONLY_THERE = """
import sys, types
only_there = types.ModuleType('only_there')
exec('class Meter:\\n    def __init__(self, rows): self.rows = rows', only_there.__dict__)
only_there.Meter.__module__ = 'only_there'
sys.modules['only_there'] = only_there
rows = [1]
meter = only_there.Meter(rows)
"""


def test_training_comes_back_beside_what_the_notebook_cannot_rebuild(kernel):
    setup(kernel, MODEL.format(optimizer="SGD(model.parameters(), lr=0.1, momentum=0.9)"))
    output = done(
        kernel, f"{ONLY_THERE}{STEP}there = model.weight.tolist()\nfresh = torch.nn.Linear(2, 2)\nsame = rows"
    )
    assert "meter (cannot be rebuilt in the notebook: ModuleNotFoundError" in output.texts[-1] or (
        "only_there (cannot be rebuilt in the notebook: ModuleNotFoundError" in output.texts[-1]
    )
    assert kernel.value("(there == model.weight.tolist(), rows, same is rows, len(optimizer.state))") == (
        (True, [1], True, 2)
    )
    assert kernel.value("fresh.weight.shape == (2, 2)") is True
    done(kernel, "rows_there = meter.rows", "--cpus 2")
    assert kernel.value("rows_there") == [1]


def test_a_function_with_a_cache_goes_both_ways(kernel):
    setup(kernel, "import functools\nshift = 2\n@functools.lru_cache(maxsize=7)\ndef there(x): return x + shift")
    done(kernel, "@functools.cache\ndef here(x): return 1 if x < 2 else x * here(x - 1)\nfound = there(1), here(5)")
    assert kernel.value("(found, here(5), here.cache_parameters()['maxsize'])") == ((3, 120), 120, None)


def test_what_a_worker_cannot_rebuild_is_named(kernel):
    setup(
        kernel,
        "import sys, types\nmine = types.ModuleType('mine')\nclass Point: pass\nPoint.__module__ = 'mine'\n"
        "mine.Point = Point\nsys.modules['mine'] = mine\npoint = Point()\nother = 4",
    )
    output = run(kernel, "print(other, point)")
    assert output.error is not None
    assert output.error[0] == "ShippingError"
    assert output.error[1].startswith(
        "`point` cannot be rebuilt on the workers: ModuleNotFoundError: No module named 'mi"
    )
    assert done(kernel, "print(other)").stdout == "4\n"
    setup(kernel, "del sys.modules['mine'], point, Point, mine")


def test_random_numbers_go_on_after_a_restart(kernel):
    setup(kernel, "import torch\ntorch.manual_seed(5)")
    done(kernel, "pass")
    setup(kernel, "%accelerate restart")
    setup(kernel, "state = torch.get_rng_state()")
    output = done(kernel, "drawn = float(torch.rand(1))")
    assert output.error is None
    assert kernel.value("(torch.set_rng_state(state), float(torch.rand(1)) == drawn)[1]") is True


ON_ONE_RANK = "import os\nif os.environ['RANK'] == '1': torch.rand(3)\n"
SHARES = """
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(8, 2)), batch_size=4):
    model(x).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("body", "flags", "ending"),
    [
        (ON_ONE_RANK, "", ""),
        (ON_ONE_RANK + "raise ValueError('after it')", "", "ValueError"),
        ("print('go', flush=True)\nwhile True: torch.rand(1)", "", "KeyboardInterrupt"),
        ("torch.rand(3)", "--ranks 1", ""),
        (SHARES, "--divide data", ""),
        (SHARES + "raise ValueError('after it')", "--divide data", "ValueError"),
    ],
)
def test_all_ranks_draw_the_notebooks_numbers_after_a_cell_in_which_they_drew_others(kernel, body, flags, ending):
    setup(kernel, "import torch\ntorch.manual_seed(5)")
    output = run(kernel, body, f"--cpus 2 {flags}", interrupt_on="go")
    assert (output.error or [""])[0] == ending
    setup(kernel, "state = torch.get_rng_state()")
    done(kernel, "print(float(torch.rand(1)))")
    first, second = kernel.run("%accelerate logs").stdout.split("--- rank 1\n")
    assert first.removeprefix("--- rank 0\n").strip() == second.strip()
    assert kernel.value("(torch.set_rng_state(state), float(torch.rand(1)))[1]") == float(second)


def test_a_replaced_layer_goes_out_and_comes_back(kernel):
    setup(kernel, "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout(0.1))")
    done(kernel, "shape = tuple(model(torch.ones(1, 2)).shape)")
    setup(kernel, "model[0] = torch.nn.Linear(2, 5)\nmodel[1].p = 0.9")
    done(kernel, "shape = tuple(model(torch.ones(1, 2)).shape)\nrate = model[1].p\nmodel[0] = torch.nn.Linear(2, 7)")
    assert kernel.value("(shape, rate, model[0].out_features)") == ((1, 5), 0.9, 7)


@pytest.mark.parametrize("change", ["%accelerate push model", "model.extra = torch.nn.Linear(1, 1)"])
def test_a_model_that_is_sent_anew_takes_its_optimizer_along(kernel, change):
    setup(kernel, MODEL.format(optimizer=SGD))
    done(kernel, STEP)
    setup(kernel, f"{change}\nbefore = model.weight.detach().clone()")
    done(kernel, STEP)
    assert kernel.value("bool((model.weight != before).all())") is True


def test_a_trainer_trains_the_notebooks_own_model(kernel):
    trainer = """
class Trainer:
    def __init__(self, model):
        self.model, self.history = model, []
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def fit(self, data):
        for _ in range(3):
            loss = self.model(data).pow(2).mean()
            loss.backward(); self.optimizer.step(); self.optimizer.zero_grad()
            self.history.append(loss.item())
trainer = Trainer(model)
before = model.weight.detach().clone()
"""
    setup(kernel, MODEL.format(optimizer=SGD) + trainer)
    output = run(kernel, "trainer.fit(data)")
    assert output.error is None, output.traceback
    assert kernel.value("(trainer.model is model, len(trainer.history), bool((model.weight != before).all()))") == (
        True,
        3,
        True,
    )


def test_names_that_live_on_the_workers_only_are_prepared_too(kernel):
    made = MODEL.format(optimizer=SGD).replace("data = torch.ones(4, 2)", "data = torch.ones(4, 2)")
    setup(kernel, "for name in ('model', 'optimizer', 'data'): globals().pop(name, None)")
    done(kernel, made, "--cpus 2 --no-return")
    step = f"data = data * (1 + accelerator_rank)\n{STEP}"
    done(kernel, "accelerator_rank = accelerator.process_index", "--cpus 2 --no-return")
    done(kernel, step, "--cpus 2 --no-return")
    assert done(kernel, SAME, "--cpus 2 --no-return").stdout == "True\n"


def test_a_function_does_not_overwrite_the_workers_own_values(kernel):
    done(kernel, "mine = accelerator.process_index")
    setup(kernel, "def read():\n    return mine")
    output = done(kernel, "print(read(), accelerator.process_index)", "--cpus 2 --show-ranks all")
    assert sorted(output.stdout.splitlines()) == ["[rank 0] 0 0", "[rank 1] 1 1"]


def test_containers_of_every_kind_and_classes_used_as_settings_follow(kernel):
    setup(kernel, "from collections import deque\nqueue = deque([1])\npair = ([], 'x')\nclass CFG:\n    rate = 1")
    done(kernel, "queue.append(CFG.rate)\npair[0].append(5)")
    setup(kernel, "CFG.rate = 2")
    done(kernel, "queue.append(CFG.rate)")
    assert kernel.value("(list(queue), pair)") == ([1, 1, 2], ([5], "x"))


def test_hyperparameters_set_in_a_cell_come_back_and_groups_may_be_added(kernel):
    setup(kernel, MODEL.format(optimizer=SGD))
    done(kernel, f"optimizer.param_groups[0]['weight_decay'] = 0.5\n{STEP}")
    assert kernel.value("optimizer.param_groups[0]['weight_decay']") == 0.5
    setup(kernel, "model.more = torch.nn.Linear(1, 1)\noptimizer.add_param_group({'params': model.more.parameters()})")
    done(kernel, f"{STEP}count = len(optimizer.param_groups)")
    assert kernel.value("count") == 2


def test_a_keyboard_interrupt_of_the_cells_own_is_an_error(kernel):
    output = run(kernel, "raise KeyboardInterrupt('mine')")
    assert output.error is not None
    assert output.error[0] == "KeyboardInterrupt"
    assert "raise KeyboardInterrupt('mine')" in output.traceback


@pytest.mark.parametrize(
    ("before", "body", "after"),
    [
        ("x = 1", "while (x := x + 1) < 5: pass", 5),
        ("x = 3", "y = x\ndel x\nx = y + 1", 4),
        ("x = 2", "%time x = x + 5", 7),
    ],
)
def test_names_in_unusual_places_are_sent(kernel, before, body, after):
    setup(kernel, before)
    done(kernel, body)
    assert kernel.value("x") == after


def test_models_of_earlier_runs_are_released(kernel):
    cell = MODEL.format(optimizer=SGD) + STEP
    count = "import gc\ngc.collect()\nnums.append(sum(isinstance(item, torch.nn.Linear) for item in gc.get_objects()))"
    setup(kernel, "nums = []")
    for _ in range(3):
        output = done(kernel, cell)
        done(kernel, count)
    assert output.receipt.count("Linear") == 1
    assert output.receipt.count("SGD") == 1
    first, *others = kernel.value("nums")
    assert others == [first, first]


def test_what_is_made_inside_a_function_trains_on_shares_whatever_ran_before(kernel):
    setup(
        kernel,
        MODEL.format(optimizer=SGD) + "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(torch.arange(16.0).view(8, 2) / 16, batch_size=4)\n"
        "def train(make):\n    net = torch.nn.Linear(2, 1)\n    own = make(net.parameters(), lr=0.1)\n"
        "    for x in loader:\n        net(x).sum().backward()\n        own.step()\n    return net\n"
        "torch.manual_seed(3)\nexpected = train(torch.optim.SGD).weight[0].tolist()",
    )
    done(kernel, "for x in loader:\n    model(x).sum().backward()\n    optimizer.step()")
    for _ in range(2):
        output = done(kernel, "torch.manual_seed(3)\nnet = train(torch.optim.SGD)")
        assert "batch 4 = 2 x 2" in output.receipt
        assert kernel.value("net.weight[0].tolist()") == pytest.approx(kernel.value("expected"))


def test_an_optimizer_with_attributes_of_its_own_is_sent_whole(kernel):
    setup(kernel, MODEL.format(optimizer="LBFGS(model.parameters())") + "before = model.weight.detach().clone()")
    body = """
def closure():
    optimizer.zero_grad()
    loss = model(data).pow(2).mean()
    loss.backward()
    return loss
optimizer.step(closure)
"""
    done(kernel, body)
    assert kernel.value("bool((model.weight != before).all())") is True


def test_validation_with_a_loss_module_reads_every_sample(kernel):
    setup(
        kernel,
        MODEL.format(optimizer=SGD)
        + "from torch.utils.data import DataLoader\nloader = DataLoader(torch.ones(23, 2), batch_size=4)\n"
        "criterion = torch.nn.MSELoss()",
    )
    body = """
for x in loader:
    criterion(model(x), x[:, :1]).backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
count = 0
for x in loader:
    with torch.no_grad():
        criterion(model(x), x[:, :1])
    count += len(x)
"""
    done(kernel, body)
    assert kernel.value("count") == 23


def test_the_default_dtype_and_the_import_path_follow(kernel):
    setup(kernel, "import sys, torch\ntorch.set_default_dtype(torch.float64)\nsys.path.append('/nowhere')")
    done(kernel, "import sys, torch\nfound = (str(torch.ones(1).dtype), sys.path[-1])")
    setup(kernel, "torch.set_default_dtype(torch.float32)\nsys.path.remove('/nowhere')")
    assert kernel.value("found") == ("torch.float64", "/nowhere")


def test_a_layer_that_is_unfrozen_after_preparation_trains_as_in_one_process(kernel):
    setup(
        kernel,
        "import copy, torch\nmodel = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))\n"
        "model[0].requires_grad_(False)\nplain = copy.deepcopy(model)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\ndata = torch.rand(6, 2)",
    )
    done(kernel, STEP)
    done(kernel, f"model[0].requires_grad_(True)\n{STEP}")
    check = (
        "optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)\n"
        f"trained, model = model, plain\n{STEP}plain[0].requires_grad_(True)\n{STEP}"
        "print(all(torch.allclose(a, b, atol=1e-6) for a, b in zip(trained.parameters(), plain.parameters())))"
    )
    assert kernel.run(check).stdout == "True\n"


GENERATORS = """
import random, numpy, torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
rows = TensorDataset(torch.arange(24.0).view(24, 1))
def seeded(seed): return torch.Generator().manual_seed(seed)
def build():
    global shared, named, own, sampled, held, bare, old, new, standard, model, optimizer
    shared, bare = seeded(1), seeded(2)
    named = DataLoader(rows, batch_size=4, shuffle=True, generator=shared)
    own = DataLoader(rows, batch_size=4, shuffle=True, generator=seeded(3))
    sampled = DataLoader(rows, batch_size=4, sampler=RandomSampler(rows, generator=seeded(4)))
    held = {'train': DataLoader(rows, batch_size=4, shuffle=True, generator=seeded(5))}
    old, new, standard = numpy.random.RandomState(6), numpy.random.default_rng(7), random.Random(8)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
def plain():
    torch.manual_seed(0)
    orders = [[int(x) for (batch,) in loader for x in batch] for loader in (named, own, sampled, held['train'])]
    return [*orders, torch.rand(1, generator=bare).item(), old.rand(), new.random(), standard.random()]
"""
DRAW = """
for loader in (named, own, sampled, held['train']):
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
drawn = torch.rand(3, generator=bare), old.rand(2), new.random(2), standard.random()
"""


def test_generators_go_on_where_the_other_side_has_left_them(kernel):
    setup(
        kernel,
        f"{GENERATORS}\nbuild()\nexpected = []\nfor _ in range(2):\n    expected.append(plain())\n"
        f"    exec({DRAW!r})\nexpected.append(plain())\nbuild()\nfound = []",
    )
    for _ in range(2):
        setup(kernel, "found.append(plain())")
        done(kernel, DRAW)
    setup(kernel, "found.append(plain())")
    assert kernel.value("[[one == other for one, other in zip(*pair)] for pair in zip(found, expected)]") == (
        [[True] * 8] * 3
    )
    assert kernel.value("named.generator is shared is named.sampler.generator") is True


def test_an_optimizer_that_wraps_another_continues_on_both_sides(kernel):
    setup(
        kernel,
        "import torch\n"
        "class Lookahead(torch.optim.Optimizer):\n"
        "    def __init__(self, base):\n"
        "        self.base, self.defaults, self.count = base, base.defaults, 0\n"
        "        self.param_groups, self.state = base.param_groups, base.state\n"
        "        self.slow = [p.detach().clone() for p in base.param_groups[0]['params']]\n"
        "    def zero_grad(self, set_to_none=True): self.base.zero_grad(set_to_none)\n"
        "    def step(self, closure=None):\n"
        "        self.base.step(closure)\n"
        "        self.count += 1\n"
        "        for slow, p in zip(self.slow, self.param_groups[0]['params']):\n"
        "            if self.count % 3 == 0: p.data.copy_(slow.lerp_(p.detach(), 0.5))\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    net = torch.nn.Linear(4, 1).double()\n"
        "    return net, Lookahead(torch.optim.Adam(net.parameters(), 0.1))\n"
        "net, opt = build()\n"
        "loader = torch.utils.data.DataLoader(torch.randn(32, 4).double(), batch_size=8)",
    )
    loop = "for x in loader:\n    opt.zero_grad()\n    net(x).square().mean().backward()\n    opt.step()"
    for _ in range(3):
        setup(kernel, loop)
    expected = kernel.value("net.weight.tolist()[0]")
    setup(kernel, "net, opt = build()")
    done(kernel, loop)
    setup(kernel, loop)
    done(kernel, loop)
    assert kernel.value("net.weight.tolist()[0]") == pytest.approx(expected, abs=1e-12)
    assert kernel.value("(opt.count, opt.state is opt.base.state)") == (12, True)


CHURN = """
import itertools, sys, threading
stop = threading.Event()
def churn():
    for number in itertools.count():
        globals()[f'made_{number % 500}'] = number
        globals().pop(f'made_{(number + 250) % 500}', None)
        if stop.is_set():
            return
interval = sys.getswitchinterval()
sys.setswitchinterval(1e-6)
thread = threading.Thread(target=churn)
thread.start()
"""
TRAIN_BESIDE = """
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
"""
STOP_CHURN = "\nstop.set()\nthread.join()\nsys.setswitchinterval(interval)"


@pytest.mark.parametrize("where", ["", "%%accelerate --cpus 2"], ids=["notebook", "workers"])
def test_a_thread_may_bind_names_while_cells_run(kernel, where):
    setup(kernel, "import torch\nmodel = torch.nn.Linear(2, 1)")
    setup(kernel, where + CHURN)
    outputs = [kernel.run(f"%%accelerate --cpus 2{TRAIN_BESIDE}") for _ in range(5)]
    setup(kernel, where + STOP_CHURN)
    assert [output.traceback for output in outputs if output.error is not None] == []


def test_objects_that_the_notebook_deletes_are_freed_as_its_cell_ends(kernel):
    setup(kernel, "import weakref, torch\nlarge = torch.zeros(10)\nreference = weakref.ref(large)")
    done(kernel, "large += 1")
    assert kernel.value("reference() is large") is True
    setup(kernel, "del large")
    assert kernel.value("reference() is None") is True
    done(kernel, "found = 'large' in globals()")
    assert kernel.value("found") is False
