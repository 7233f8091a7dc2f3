"""The statements of random sessions that make and train models: fields are those of `statements`."""

from __future__ import annotations

from tests.properties.sessions.kind import Kind

_TRAIN = """\
for {v} in range({n}):
    {optimizer}.zero_grad()
    loss = {model}(torch.full((4, 2), 0.5 * {n})).pow(2).mean()
    loss.backward()
    {optimizer}.step()"""
_TRAIN_LOADER = """\
for xb, yb in {loader}:
    {optimizer}.zero_grad()
    loss = F.mse_loss({model}(xb), yb)
    loss.backward()
    {optimizer}.step()
    {list}.append(loss.item())"""
_TRAIN_STOP = """\
batches = iter({loader})
while True:
    try:
        xb, yb = next(batches)
    except StopIteration:
        break
    {optimizer}.zero_grad()
    if (loss := F.l1_loss({model}(xb), yb)).item() < 0.05: continue
    loss.backward()
    nn.utils.clip_grad_norm_({model}.parameters(), 0.5)
    {optimizer}.step()
else:
    {list}.append('else')"""
_TRAIN_RANDOM = """\
for {v} in range({n}):
    {optimizer}.zero_grad()
    chosen = torch.randperm(6)[:4]
    batch = torch.arange(12.0).view(6, 2)[chosen] + 0.1 * torch.randn(4, 2)
    loss = {model}(batch).mean() * random.random() + np.random.rand()
    loss.backward()
    {optimizer}.step()
    if loss.item() > 1e6: break
else:
    {dict}['finished'] = {n}"""
_TRAINER = """\
class {x}Base:
    made = 0
    def __init__(self, model, optimizer):
        type(self).made += 1
        self.model, self.optimizer, self._step, self.callbacks, self.best = model, optimizer, 0, [], None
    @property
    def step(self): return self._step
    @step.setter
    def step(self, value):
        self._step = value
        for callback in self.callbacks: callback(self)
class {x}Mixin:
    def fit(self, steps={n}):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss = self.model(torch.ones(4, 2) * 0.2).pow(2).mean()
            self.loss.backward()
            self.optimizer.step()
            self.step += 1
        self.best = copy.deepcopy(self.model.state_dict())
        self.loss = self.loss.item()
class {x}Class({x}Mixin, {x}Base):
    def fit(self, *a):
        super().fit(*a)
        return self
{x} = {x}Class({model}, {optimizer})"""
_METRIC = """\
class {x}Metric:
    def __init__(self): self.total, self.count, self.rows = torch.zeros(2), 0, collections.defaultdict(list)
    def update(self, value):
        self.total += value
        self.count += 1
        self.rows['v'].append(value)
        return self
    @property
    def mean(self): return self.total / max(1, self.count)
    def __iadd__(self, value): return self.update(value)
    def __len__(self): return self.count
{x} = {x}Metric()"""
_AVERAGE = """\
class {x}Average:
    def __init__(self, model):
        self.model, self.shadow, self.backup = model, copy.deepcopy(model.state_dict()), None
    def update(self):
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                if name in self.shadow: self.shadow[name].mul_(0.5).add_(value, alpha=0.5)
    def __enter__(self):
        self.backup = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.shadow, strict=False)
        return self
    def __exit__(self, *error):
        self.model.load_state_dict(self.backup)
        self.backup = None
{x} = {x}Average({model})"""

TRAINING: dict[str, Kind] = {
    "trainer": Kind(
        (_TRAINER, "{x} = {trainer}"),
        (
            "{x}.fit()",
            "{x}.fit(1)",
            "{x}.callbacks.append(lambda trainer: {list}.append(trainer.step))",
            "{x}.callbacks.append({list}.append)",
            "{x}.callbacks.clear()",
            "{x}.step = {n}",
            "{x}.model.load_state_dict({x}.best) if {x}.best else None",
            "{x}.optimizer = torch.optim.Adagrad({x}.model.parameters(), lr=0.1)",
            "{x}.model = {model}",
            "{list}.append(type({x}).made)",
            "{x}.fit = functools.partial({x}.fit, 1)",
            "{dict}['trainer'] = {x}",
        ),
    ),
    "metric": Kind(
        (_METRIC, "{x} = {metric}", "{x} = copy.deepcopy({metric})"),
        (
            "{x}.update({n})",
            "{x} += {n}",
            "{x}.total.zero_()",
            "{x}.total = {x}.total * 2",
            "{list}.append({x}.mean)",
            "{list}.append({x}.rows)",
            "{x}.rows['w']",
            "{x}.rows.clear()",
            "{x}.update(len({list}))",
        ),
    ),
    "average": Kind(
        (_AVERAGE,),
        (
            "{x}.update()",
            "with {x}: print(round(sum(p.sum().item() for p in {x}.model.parameters()), 6))",
            "with {x} as held:\n    {list}.append(held is {x})",
            "{x}.shadow = {x}.model.state_dict()",
            "{x}.model.load_state_dict({x}.shadow)",
            "{dict}['shadow'] = {x}.shadow",
        ),
    ),
    "model": Kind(
        (
            "{x} = nn.Linear(2, 1)",
            "{x} = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))",
            "{x} = {model}",
            "{x} = nn.Sequential({model}, nn.Identity())",
            "{x} = nn.utils.parametrizations.weight_norm(nn.Linear(2, 1))",
            "{x} = copy.deepcopy({model})",
            "{x} = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))",
            "class {x}Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.a = nn.Linear(2, 1)\n        self.seen, self.count = [], 0\n"
            "        self.register_buffer('mean', torch.zeros(1))\n    def forward(self, x):\n"
            "        self.count += 1\n        return self.a(x)\n{x} = {x}Net()",
            "{x} = nn.Linear(2, 1)\n{x}.held = {any}",
            "{x} = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))\n{x}[1].weight = {x}[0].weight",
            "{x} = nn.Linear(2, 1).requires_grad_(False)",
            "{x} = pickle.loads(pickle.dumps({model}))",
            "{x} = torch.optim.swa_utils.AveragedModel({model})",
            "class {x}Step(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x): return x.sign()\n"
            "    @staticmethod\n    def backward(ctx, grad): {list}.append({n}); return grad\n"
            "class {x}Net(nn.Linear):\n    def forward(self, x): return {x}Step.apply(super().forward(x))\n"
            "{x} = {x}Net(2, 1)",
        ),
        (
            "{x}.eval()",
            "{x}.train()",
            "{x}.note = [{n}]",
            "nn.init.constant_(next({x}.parameters()), 0.{n})",
            "{x}.zero_grad()",
            "{x}(torch.ones(2, 2)).sum().backward()",
            "print(round({x}(torch.ones(2, 2)).sum().item(), 6))",
            "{x}.load_state_dict({x}.state_dict())",
            "{x}.requires_grad_(True)",
            "{x}.register_forward_hook(lambda m, a, o: {list}.append({n}))",
            "{dict}['state'] = {x}.state_dict()",
            "{dict}['copy'] = copy.deepcopy({x}.state_dict())",
            "{x}.double()",
            "{x}.add_module('extra', nn.Linear(1, 1))",
            "next({x}.parameters()).data.mul_(0.5)",
            "{x}.held = {any}",
            "del {x}.note",
            "next({x}.parameters()).grad = None",
            "torch.save({x}.state_dict(), 'm.pt')",
            "{x}.load_state_dict(torch.load('m.pt'))",
            "{x}.register_buffer('extra_{d}', torch.ones({n}), persistent={d} == 1)",
            "{x}.register_parameter('scale', nn.Parameter(torch.ones(1)))",
            "{x}.apply(lambda m: {list}.append(type(m).__name__))",
            "prune.l1_unstructured(next(m for m in {x}.modules() if isinstance(m, nn.Linear)), 'weight', 0.5)",
            "{x}.register_forward_pre_hook(lambda m, a: (a[0] * 1.5,))",
            "kept = io.BytesIO()\ntorch.save({x}.state_dict(), kept)\nkept.seek(0)\n"
            "{x}.load_state_dict(torch.load(kept))",
            "{x}.register_forward_hook(lambda m, a, o: {dict}.update(out=o.detach()))",
            "{x}.register_full_backward_hook(lambda m, i, o: {list}.append(len(o)))",
            "if type({x}).__module__ == '__main__': type({x}).shared = getattr(type({x}), 'shared', 0) + 1",
            "[p.requires_grad_(not p.requires_grad) for p in {x}.parameters()]",
            "nn.utils.vector_to_parameters(nn.utils.parameters_to_vector({x}.parameters()) * 0.5, {x}.parameters())",
        ),
    ),
    "optimizer": Kind(
        (
            "{x} = torch.optim.SGD({model}.parameters(), lr=0.1)",
            "{x} = torch.optim.Adam({model}.parameters(), lr=0.01)",
            "{x} = torch.optim.SGD({model}.parameters(), lr=0.1, momentum=0.9)",
            "{x} = {optimizer}",
            "{x} = torch.optim.AdamW([{{'params': {model}.parameters(), 'lr': 0.0{n}1}}])",
        ),
        (
            "{x}.param_groups[0]['lr'] = 0.0{n}",
            _TRAIN.replace("{optimizer}", "{x}"),
            _TRAIN.replace("{optimizer}", "{x}"),
            _TRAIN_LOADER.replace("{optimizer}", "{x}"),
            "{x}.zero_grad()",
            "{dict}['optimizer'] = {x}.state_dict()",
            "{x}.own = [{n}]",
            "{x}.load_state_dict({x}.state_dict())",
            "{x}.state.clear()",
            "{x}.step()",
            "{x}.param_groups[0]['note'] = [{n}]",
            "{x}.add_param_group({{'params': [nn.Parameter(torch.ones({n}))], 'lr': 0.01}})",
            "{x}.register_step_post_hook(lambda o, a, k: {list}.append({n}))",
            "for group in {x}.param_groups: group['lr'] *= 0.5",
            "kept = io.BytesIO()\ntorch.save({x}.state_dict(), kept)\nkept.seek(0)\n"
            "{x}.load_state_dict(torch.load(kept))",
            "{x} = type({x})({model}.parameters(), lr=0.02)",
            _TRAIN_STOP.replace("{optimizer}", "{x}"),
            _TRAIN_RANDOM.replace("{optimizer}", "{x}"),
        ),
    ),
    "scheduler": Kind(
        (
            "{x} = torch.optim.lr_scheduler.StepLR({optimizer}, 1, 0.5)",
            "{x} = torch.optim.lr_scheduler.LambdaLR({optimizer}, lambda step: 1 / (step + {n}))",
            "{x} = torch.optim.lr_scheduler.OneCycleLR({optimizer}, 0.1, total_steps=50)",
            "{x} = torch.optim.lr_scheduler.ReduceLROnPlateau({optimizer})",
        ),
        (
            "{x}.step() if hasattr({x}, '_step_count') else {x}.step(1.0)",
            "{x}.gamma = 0.{n}",
            "{list}.append({x}.state_dict().get('last_epoch'))",
        ),
    ),
    "loader": Kind(
        (
            "{x} = DataLoader(TensorDataset(torch.arange(16.0).view(8, 2) / 16, torch.ones(8, 1)), batch_size=4)",
            "{x} = DataLoader(TensorDataset(torch.rand(6, 2), torch.rand(6, 1)), batch_size=2, shuffle=True)",
            "{x} = DataLoader(TensorDataset(torch.ones(5, 2), torch.ones(5, 1)), batch_size=2,"
            " shuffle=True, generator=torch.Generator().manual_seed({n}))",
            "class {x}Order(torch.utils.data.Sampler):\n"
            "    def __init__(self): self.epoch, self.seen, self.random = 0, [], random.Random({n})\n"
            "    def __len__(self): return 6\n    def __iter__(self):\n        self.epoch += 1\n"
            "        order = self.random.sample(range(6), 6)\n        self.seen.append(order[0])\n"
            "        yield from order\n"
            "{x} = DataLoader(TensorDataset(torch.arange(12.0).view(6, 2) / 9, torch.ones(6, 1)), batch_size=4,"
            " sampler={x}Order())",
            "{x} = DataLoader([(torch.ones(2) * i / 5, torch.ones(1) * i) for i in range(5)], batch_size=2,"
            " collate_fn=lambda items: [torch.stack(part) * {n} for part in zip(*items)])",
            "class {x}Data(Dataset):\n    reads = 0\n    def __init__(self): self.cache = {{}}\n"
            "    def __len__(self): return 5\n    def __getitem__(self, i):\n        type(self).reads += 1\n"
            "        return self.cache.setdefault(i, (torch.ones(2) * i / 5, torch.ones(1) * random.random()))\n"
            "{x} = DataLoader({x}Data(), batch_size=2)",
            "class {x}Stream(torch.utils.data.IterableDataset):\n    def __init__(self): self.passes = 0\n"
            "    def __iter__(self):\n        self.passes += 1\n"
            "        for i in range(5): yield torch.ones(2) * i / 5, torch.ones(1) * self.passes\n"
            "{x} = DataLoader({x}Stream(), batch_size=2)",
            "{x} = DataLoader(torch.utils.data.ConcatDataset([{loader}.dataset, {loader}.dataset]), batch_size=4)"
            " if hasattr({loader}.dataset, '__len__') else {loader}",
        ),
        (
            "for xb, yb in {x}: {list}.append(xb.sum().item())",
            "xb, yb = next(iter({x}))",
            "{x}.note = [{n}]",
            "{list}.append(len({x}.dataset))",
        ),
    ),
}
