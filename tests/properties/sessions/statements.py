"""The statements of random sessions, by the kind of object that they make or change.

``{x}`` is the name that a statement binds or changes; ``{n}`` a small number; ``{any}`` any bound name; ``{list}`` a
bound name of that kind. A statement whose names do not exist yet is not chosen.
"""

from __future__ import annotations

from importlib.util import find_spec

from tests.properties.sessions.kind import Kind
from tests.properties.sessions.training_statements import TRAINING

IMPORTS = """\
import abc, collections, contextlib, contextvars, copy, dataclasses, enum, functools, io, itertools, logging, math, os
import pickle, random, sys, threading, time, types, warnings, weakref
import numpy as np, torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Dataset, TensorDataset
"""
NEEDS_PANDAS = frozenset({"frame", "series"})
HAS_PANDAS = find_spec("pandas") is not None
if HAS_PANDAS:
    IMPORTS += "import pandas as pd\n"

_COUNTING_DECORATOR = """\
def {x}_counted(wrapped):
    @functools.wraps(wrapped)
    def inner(*a, **k):
        inner.calls += 1
        return wrapped(*a, **k)
    inner.calls = 0
    return inner
@{x}_counted
def {x}(): return {n}"""
_CLASS_DECORATOR = """\
class {x}_Timed:
    def __init__(self, wrapped): self.wrapped, self.calls = wrapped, []
    def __call__(self, *a): self.calls.append(len(a)); return self.wrapped(*a)
    def __get__(self, item, kind): return self if item is None else functools.partial(self, item)
@{x}_Timed
def {x}(*a): return {n}"""
_GENERATOR_TRAIN = """\
def {x}(steps={n}):
    for step in range(steps):
        {optimizer}.zero_grad()
        loss = {model}(torch.ones(4, 2) * 0.1).pow(2).mean()
        loss.backward()
        {optimizer}.step()
        {list}.append(step)
        yield loss.item()"""
_FUNCTION_TRAIN = """\
def {x}(steps={n}):
    for _ in range(steps):
        {optimizer}.zero_grad()
        out = {model}(torch.ones(4, 2) * 0.3).pow(2).mean()
        out.backward()
        {optimizer}.step()
    return out.item()"""

KINDS: dict[str, Kind] = {
    "number": Kind(
        ("{x} = {n}", "{x} = {n} / 7", "{x} = len({list})", "{x} = complex({n}, 1)", "{x} = np.float32({n})"),
        ("{x} += {n}", "{x} = {x} * 2", "for {x} in range({n}): pass"),
    ),
    "text": Kind(("{x} = 't{n}'", "{x} = f'{n}-{{type({any}).__name__}}'"), ("{x} += '{n}'",)),
    "list": Kind(
        (
            "{x} = [{n}, {n}]",
            "{x} = [{any}, {any}]",
            "{x} = list(range({n}))",
            "{x} = [[{n}], [{any}], {n}]",
            "{x} = {list}",
            "{x} = {list}[:]",
            "{x} = [[]] * 3",
            "{x} = sorted({list}, key=id)[:0]",
            "{x} = [object() for _ in range({n})]",
            "{x} = copy.deepcopy({list})",
            "{x} = [[i] for i in range(140)]",
            "{x} = {dict}.setdefault('own', [])",
        ),
        (
            "{x}.append({n})",
            "{x}.append({any})",
            "{x}[:1] = [{n}]",
            "{x}.reverse()",
            "{x} = {x} + [{n}]",
            "{x} += [{any}]",
            "del {x}[-1:]",
            "{x}.insert(0, [{n}])",
            "{x}.extend(range({n}))",
            "{x} *= 1",
            "{x}.clear()",
            "{x}.append({x}[:1])",
            "for item in {x}:\n    if isinstance(item, list): item.append({n})",
        ),
    ),
    "dict": Kind(
        (
            "{x} = {{'a': {n}, 'b': {any}}}",
            "{x} = dict.fromkeys(range({n}), {list})",
            "{x} = collections.OrderedDict(a={any})",
            "{x} = collections.defaultdict(list, a={list})",
            "{x} = collections.Counter('aab' * {n})",
            "{x} = {dict}",
            "{x} = {{'own': {{'deep': [{any}]}}}}",
            "{x} = dict({dict})",
            "{x} = {{{n}: {{}}, (1, {n}): {any}}}",
            "{x} = types.SimpleNamespace(a={any}, b=[{n}]).__dict__",
        ),
        (
            "{x}['k{n}'] = {any}",
            "{x}.pop('a', None)",
            "{x}.update(c={n})",
            "{x}['own'] = {list}",
            "{x}.clear()",
            "{x}.setdefault('s', []).append({n})",
            "{x}['a'] = {x}.pop('a', {n})",
        ),
    ),
    "set": Kind(
        ("{x} = {{{n}, 'a'}}", "{x} = set(range({n}))", "{x} = frozenset([{n}, (1, 2)])", "{x} = {{{point}}}"),
        ("{x} = {x} | {{{n}}}", "{x} |= {{'q{n}'}}"),
    ),
    "tuple": Kind(
        ("{x} = ({any}, {n})", "{x} = {any}, {any}", "{x} = {pair}(first={any}, second={n})"), ("{x} = {x} + ({n},)",)
    ),
    "deque": Kind(
        ("{x} = collections.deque([{n}], maxlen=4)", "{x} = collections.deque([{any}, [{n}]])"),
        ("{x}.append({n})", "{x}.appendleft({any})", "{x}.rotate(1)", "len({x}) and {x}.pop()"),
    ),
    "array": Kind(
        (
            "{x} = np.arange({n}.0)",
            "{x} = np.zeros((3, 4))",
            "{x} = np.ones(4, np.float32) * {n}",
            "{x} = {array}[1:]",
            "{x} = {array}.T",
            "{x} = {array}.copy()",
            "{x} = np.array([1 + 2j, {n}])",
            "{x} = {array}",
            "{x} = np.array(['a', 'b{n}'])",
            "{x} = {tensor}.detach().numpy()",
            "{x} = np.array([{list}, None], object)",
            "{x} = np.random.rand(3)",
            "{x} = {array}[::2]",
            "{x} = {array}.reshape(-1)",
            "{x} = {array}.view()",
            "{x} = np.ma.array([1, {n}], mask=[0, 1])",
            "{x} = np.array([(1, 2.0)], dtype=[('a', int), ('b', float)])",
            "{x} = np.asfortranarray(np.ones((2, 3)))",
            "{x} = np.frombuffer(bytearray(b'abcd'), np.uint8)",
            "{x} = np.array('2020-01-0{d}', 'datetime64[D]')",
            "{x} = {frame}['a'].to_numpy()",
            "{x} = {frame}['a'].values",
            "{x} = np.broadcast_to(np.arange(3), (2, 3))",
        ),
        (
            "{x} += 1",
            "{x}[...] = {x}[...] * 2",
            "{x}.flat[0] = {n}",
            "{x} = {x} + 1",
            "{x}.shape = (-1,)",
            "{x}.fill({n})",
            "{x}.sort()",
            "np.add({x}, 1, out={x})",
        ),
    ),
    "tensor": Kind(
        (
            "{x} = torch.zeros(3)",
            "{x} = torch.ones(4, 2) * {n}",
            "{x} = torch.arange({n})",
            "{x} = {tensor}[1:]",
            "{x} = {tensor}.T",
            "{x} = {tensor}",
            "{x} = {tensor}.view(-1)",
            "{x} = {tensor}.detach()",
            "{x} = {tensor}.clone()",
            "{x} = torch.rand(3)",
            "{x} = torch.ones(3, requires_grad=True)",
            "{x} = nn.Parameter(torch.ones(2) * {n})",
            "{x} = torch.eye(3).to_sparse()",
            "{x} = torch.tensor([1 + 2j, {n}])",
            "{x} = torch.as_tensor({array})",
            "{x} = {tensor} * 2",
            "{x} = next({model}.parameters())",
            "{x} = next({model}.parameters()).data",
            "{x} = {tensor}.unsqueeze(0)",
            "{x} = torch.tensor([[True, False]])",
            "{x} = torch.ones(2, dtype=torch.bfloat16)",
            "{x} = {tensor}.expand(2, *{tensor}.shape)",
            "{x} = {tensor}.grad",
            "{x} = torch.from_numpy(np.arange({n}.0))",
            "{x} = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)",
            "{x} = {tensor}.storage().tolist()",
            "{x} = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])",
            "{x} = torch.eye(2).to_sparse_csr()",
            "{x} = nn.Buffer(torch.ones(2))",
            "{x} = torch.stack([{tensor}] * 2)",
        ),
        (
            "{x}.data.add_(1)",
            "{x}.detach().mul_(2)",
            "{x} = {x} + 1",
            "{x}.requires_grad_()",
            "{x}.sum().backward()",
            "{x}.grad = None",
            "{x}.register_hook(print)",
            "{x}.own = [{n}]",
            "{x}.resize_(2)",
            "{x}.data = torch.ones(2)",
            "{x}.zero_()",
            "{x}.t_()",
            "with torch.no_grad():\n    {x}.fill_({n})",
            "{x}.data = {tensor}.data",
            "{x}.copy_({x} * 2)",
            "{x}.retain_grad()",
            "{x}.set_(torch.ones(3))",
            "{x}.detach_()",
        ),
    ),
    "random": Kind(
        (
            "{x} = random.Random({n})",
            "{x} = np.random.default_rng({n})",
            "{x} = np.random.RandomState({n})",
            "{x} = torch.Generator().manual_seed({n})",
            "{x} = np.random.Generator(np.random.PCG64({n}))",
        ),
        (
            "{x}.random() if hasattr({x}, 'random') else ({x}.rand() if hasattr({x}, 'rand') else"
            " torch.rand(2, generator={x}))",
            "{list}.append(repr({x}.random() if hasattr({x}, 'random') else 0))",
        ),
    ),
    "class": Kind(
        (
            "class {x}:\n    shared = [{n}]\n    rate = {n}\n    def __init__(self): self.own = {n}\n"
            "    def step(self): self.own += 1; return self.own",
            "class {x}:\n    cache = {{}}\n    other = {any}\n    def __init__(self): self.made = {any}\n"
            "    @property\n    def twice(self): return [self.made, {n}]\n    @classmethod\n"
            "    def count(cls): cls.total = getattr(cls, 'total', 0) + 1",
            "@dataclasses.dataclass\nclass {x}:\n    items: list = dataclasses.field(default_factory=list)\n"
            "    size: int = {n}\n    def step(self): self.items.append(self.size)",
            "class {x}:\n    __slots__ = ('own', 'more')\n    def __init__(self): self.own = [{n}]\n"
            "    def step(self): self.more = {n}",
            "class {x}({class}):\n    def step(self): self.child = {n}; return {n}",
            "@dataclasses.dataclass(frozen=True)\nclass {x}:\n    size: int = {n}\n"
            "    items: list = dataclasses.field(default_factory=list)\n"
            "    def step(self): self.items.append({n})",
            "class {x}(list):\n    def step(self): self.append({n})",
            "class {x}(dict):\n    def step(self): self[{n}] = self.__dict__",
            "class {x}(Exception):\n    def step(self): self.args = ({n},)",
            "class {x}:\n    def __init__(self): self.own, self.seen = [{n}], []\n"
            "    def __getstate__(self): return {{'own': self.own, 'seen': self.seen}}\n"
            "    def __setstate__(self, state): self.__dict__.update(state)\n    def step(self): self.seen.append({n})",
            "class {x}:\n    def __init__(self): self.fn = lambda v: v + {n}\n"
            "    def __eq__(self, other): return True\n    __hash__ = None\n"
            "    def step(self): self.last = self.fn(1)",
            "class {x}(abc.ABC):\n    made = []\n"
            "    def step(self): type(self).made.append(self); self.number = len(self.made)",
            "class {x}:\n    def __init__(self): self.made = []\n"
            "    def __enter__(self): self.made.append({n}); return self\n"
            "    def __exit__(self, *a): self.made.append(0)\n    def step(self):\n        with self: pass",
            "class {x}:\n    @functools.cached_property\n    def table(self): return [{n}]\n"
            "    def step(self): self.table.append(1)",
            "class {x}:\n    count, made = 0, weakref.WeakSet()\n    def __init__(self):\n"
            "        {x}.count += 1; self.made.add(self); self._rate = {n}\n"
            "    @property\n    def rate(self): return self._rate\n"
            "    @rate.setter\n    def rate(self, value): self._rate = value; {x}.count += 1\n"
            "    def step(self): self.rate = {n}",
            "class {x}:\n    registry = {{}}\n    def __init_subclass__(cls, **kw):\n"
            "        super().__init_subclass__(**kw); {x}.registry[cls.__name__] = cls\n"
            "    def step(self): self.known = list({x}.registry)",
            "class {x}:\n    def __init__(self): self.place, self.inner = 0, [{n}]\n"
            "    def __iter__(self): return self\n    def __next__(self):\n        self.place += 1\n"
            "        if self.place > {n}: raise StopIteration\n        return self.place\n"
            "    def __getattr__(self, name):\n        if name.startswith('__') or name == 'inner':\n"
            "            raise AttributeError(name)\n        return getattr(self.inner, name)\n"
            "    def step(self): return next(self, None)",
            "class {x}:\n    class Inner:\n        size = [{n}]\n"
            "    @staticmethod\n    def build(): return {x}.Inner()\n"
            "    def step(self): self.parts = [*getattr(self, 'parts', []), self.build()]",
            "class {x}:\n    def __init__(self): self.data = {{}}\n    def __getitem__(self, k): return self.data[k]\n"
            "    def __setitem__(self, k, v): self.data.setdefault(k, []).append(v)\n"
            "    def __len__(self): return len(self.data)\n    def __contains__(self, k): return k in self.data\n"
            "    def step(self): self['s'] = {n}",
        ),
        (
            "{x}.rate = {n}",
            "{x}.shared = getattr({x}, 'shared', []) + [{n}]",
            "{x}.extra = {any}",
            "{x}.step = lambda self: {n}",
            "getattr({x}, 'shared', []).append({n})",
            "getattr({x}, 'cache', {{}})['k'] = {any}",
        ),
    ),
    "point": Kind(
        (
            "{x} = {class}()",
            "{x} = copy.copy({point})",
            "{x} = {point}",
            "{x} = copy.deepcopy({point})",
            "{x} = types.SimpleNamespace(own={any}, step=lambda: {n})",
        ),
        (
            "{x}.step()",
            "{x}.extra = {any}",
            "{x}.own = [{n}]",
            "vars({x}).pop('extra', None)",
            "{x}.other = {x}",
            "{x}.__dict__['d'] = {any}",
            "{x}.__class__ = {class}",
            "{x}.bound = {x}.step",
        ),
    ),
    "enum": Kind(
        (
            "class {x}(enum.Enum):\n    A = {n}\n    B = 'b'\n    C = [1]",
            "{x} = enum.Enum('{x}', 'A B')",
            "class {x}(enum.IntFlag):\n    A = 1\n    B = 2",
            "class {x}(enum.StrEnum):\n    A = 'a{n}'\n    B = 'b'",
        ),
        ("{list}.append({x}.A)", "{dict}['e'] = {x}.B", "{dict}[{x}.A] = {n}"),
    ),
    "pair": Kind(("{x} = collections.namedtuple('{x}', 'first second')",), ("{list}.append({x}([{n}], {any}))",)),
    "function": Kind(
        (
            "def {x}(v={n}): return v + {n}",
            "def {x}(): {list}.append({n}); return len({list})",
            "def {x}(v=[]): v.append({n}); return v",
            "def {x}():\n    global total\n    total = globals().get('total', 0) + {n}\n    return total",
            "def {x}(own={any}): return own",
            "{x} = lambda: {any}",
            "{x} = (lambda held: lambda: held)({any})",
            "def make(count={n}):\n    def {x}():\n        nonlocal count\n        count += 1\n"
            "        return count\n    return {x}\n{x} = make()",
            "{x} = functools.partial(max, {n})",
            "{x} = functools.partial({function})",
            "{x} = {list}.append",
            "{x} = {point}.step",
            "{x} = {function}",
            "@functools.wraps({function})\ndef {x}(*a): return {function}(*a)",
            "{x} = functools.partial(setattr, {point}, 'extra')",
            _FUNCTION_TRAIN,
            "@contextlib.contextmanager\ndef {x}():\n    {list}.append('in')\n    yield\n    {list}.append('out')",
            _GENERATOR_TRAIN,
            _COUNTING_DECORATOR,
            _CLASS_DECORATOR,
            "def {x}(*, log={list}, **kw): log.append(kw); return log",
            "{x} = type('{x}', (), {{'__call__': lambda self: {n}}})()",
            "def {x}():\n    held = []\n    def push(v={n}): held.append(v); return held\n    return push\n{x} = {x}()",
            "def {x}():\n    yield {n}\n    yield {any}",
            "@torch.no_grad()\ndef {x}(): return {model}(torch.ones(1, 2))",
            "def {x}(**kw): return {x}.__dict__.setdefault('calls', []).append({n})",
            "def {x}():\n    class Inner:\n        n = {n}\n    return Inner()",
        ),
        (
            "{list}.append({x}())",
            "{x}()",
            "{x}.calls = [{n}]",
            "{x}.own = {any}",
            "{x}.__defaults__ = ({n},)",
            "list({x}() or [])",
        ),
    ),
    "cached": Kind(
        (
            "@functools.lru_cache\ndef {x}(v): return v * {n}",
            "@functools.cache\ndef {x}(v): return [v, {n}]",
            "@functools.lru_cache(maxsize=2)\ndef {x}(v): return {list}",
        ),
        (
            "{x}({n})",
            "{list}.append({x}({n}))",
            "{x}.cache_clear()",
            "{x}({n}); {list}.append({x}.cache_info().currsize)",
        ),
    ),
    "iterator": Kind(
        (
            "{x} = iter([{n}, 2, 3])",
            "{x} = iter({list})",
            "{x} = itertools.count({n})",
            "{x} = enumerate([{any}, 2])",
            "{x} = zip([1, 2], [{n}, 4])",
            "{x} = (i * {n} for i in range(4))",
            "{x} = map(abs, [-1, -{n}])",
            "{x} = iter({loader})",
            "{x} = itertools.cycle([1, {n}])",
            "{x} = iter({dict})",
            "{x} = reversed([1, {n}])",
            "{x} = itertools.chain([1], [{n}])",
        ),
        ("{list}.append(repr(next({x}, None))[:20])", "next({x}, None)"),
    ),
    "frame": Kind(
        (
            "{x} = pd.DataFrame({{'a': [1.0, {n}, 3], 'b': ['x', 'y', 'z']}})",
            "{x} = {frame}",
            "{x} = {frame}[['a']]",
            "{x} = {frame}.copy()",
            "{x} = pd.DataFrame(np.arange(6.0).reshape(3, 2), columns=['a', 'c'])",
            "{x} = {frame}[{frame}['a'] > 1]",
            "{x} = {frame}.assign(c={n})",
            "{x} = pd.DataFrame({{'a': {frame}['a']}})",
        ),
        (
            "{x}.loc[0, 'a'] = {n}",
            "{x}['d'] = {n}",
            "{x}['a'] += 1",
            "{x}.drop(columns=['d'], inplace=True, errors='ignore')",
            "{x}.attrs['k'] = {any}",
            "{x} = {x}.sort_values('a')",
            "{x}.iloc[0, 0] = 0.5",
            "{x}.rename(columns={{'c': 'd'}}, inplace=True)",
            "{x}.loc[len({x})] = {x}.iloc[0]",
            "{x}.index.name = 'i{n}'",
        ),
    ),
    "series": Kind(
        (
            "{x} = {frame}['a']",
            "{x} = pd.Series([{n}, 2.0])",
            "{x} = pd.Series(['a', 'b'], dtype='category')",
            "{x} = {frame}['a'] * 2",
            "{x} = pd.Series(pd.to_datetime(['2020-01-0{d}']))",
        ),
        ("{x}.iloc[0] = {x}.iloc[-1]", "{x}.name = 'n{n}'", "{x}.index = {x}.index[::-1]"),
    ),
    "stream": Kind(
        (
            "{x} = io.StringIO('a{n}')",
            "{x} = io.BytesIO(b'abc')",
            "{x} = bytearray(b'{n}')",
            "{x} = memoryview(bytearray(b'{n}'))",
        ),
        ("{x}.seek(0)", "{x}.read(1)", "{x}[0] = 65", "{x}.write('{n}')"),
    ),
    "file": Kind(
        ("{x} = open('log{d}.txt', 'w')", "{x} = open('log{d}.txt', 'a')"),
        ("{x}.write('line {n}\\n')", "{x}.flush()", "print({n}, file={x})", "{x}.close()"),
    ),
    "context": Kind(
        ("{x} = contextvars.ContextVar('{x}', default={n})", "{x} = threading.local()"),
        (
            "{x}.set({any}) if hasattr({x}, 'set') else setattr({x}, 'own', {n})",
            "{list}.append({x}.get() if hasattr({x}, 'get') else getattr({x}, 'own', None))",
        ),
    ),
    "logger": Kind(
        ("{x} = logging.getLogger('ses{d}')",),
        (
            "{x}.setLevel(logging.INFO)",
            "{x}.addHandler(logging.StreamHandler())",
            "{x}.warning('w{n}')",
            "{x}.info('i{n}')",
            "{x}.addHandler(logging.FileHandler('ses{d}.log'))",
            "{x}.handlers.clear()",
            "{x}.propagate = False",
        ),
    ),
    "thread": Kind(
        (
            "{x} = threading.Lock()",
            "{x} = threading.Event()",
            "{x} = threading.Thread(target={list}.append, args=({n},))\n{x}.start(); {x}.join()",
        ),
        ("{x}.set()",),
    ),
    "error": Kind(
        ("try: {n} / 0\nexcept ZeroDivisionError as caught: {x} = caught", "{x} = ValueError({any})"),
        ("{x}.note = [{n}]", "{x}.args = ({n},)", "{x}.add_note('n{n}')"),
    ),
    **TRAINING,
}

PROCESS = (
    "random.seed({n})",
    "np.random.seed({n})",
    "torch.manual_seed({n})",
    "print(random.random())",
    "print(np.random.rand())",
    "print(torch.rand(1).item())",
    "torch.set_default_dtype(torch.float64)",
    "torch.set_default_dtype(torch.float32)",
    "torch.set_grad_enabled(False)",
    "torch.set_grad_enabled(True)",
    "torch.set_grad_enabled(True)",
    "os.environ['SES_{d}'] = '{n}'",
    "os.environ.pop('SES_{d}', None)",
    "os.makedirs('sub{d}', exist_ok=True); os.chdir('sub{d}')",
    "os.chdir('..') if 'sub' in os.getcwd() else None",
    "sys.path.append('/ses_{d}')",
    "sys.path[:] = [p for p in sys.path if 'ses_' not in p]",
    "warnings.simplefilter('ignore', FutureWarning)",
    "warnings.filterwarnings('error', 'bad{n}')",
    "np.seterr(divide='ignore')",
    "np.set_printoptions(precision={n})",
    "torch.use_deterministic_algorithms(True)",
    "torch.use_deterministic_algorithms(False)",
    "open('data{d}.txt', 'w').write('{n}')",
    "print(sorted(os.listdir('.')))",
    "sys.setrecursionlimit(3000 + {n})",
    "pd.set_option('display.max_rows', {n})",
    "time.sleep(0.001)",
    "logging.getLogger().setLevel(logging.INFO)",
)

GENERAL = (
    "del {any}",
    "{alias} = {any}",
    "{any}",
    "print(type({any}).__name__)",
    "del {any}, {any}",
    "{any}, {any} = {any}, {any}",
    "{any} = None",
    "try:\n    {any}.missing\nexcept AttributeError: pass",
    "{any} = {any}",
    "if {n} > 3: {alias} = [{any}]",
    "with contextlib.suppress(Exception): {any}.append({n})",
    "_ = {any}",
    "{any} is {any}",
    "globals()['{alias}'] = {any}",
    "exec('{alias} = {any}')",
    "gc_before = id({any}) == id({any})",
    "{alias} = copy.copy({any})",
    "%time {alias} = {any}",
    "print([name for name in ('model0', 'list0', 'dict0') if name in globals()])",
    "match {any}:\n    case [first, *_]: {alias} = first\n    case {{'a': found}}: {alias} = found\n"
    "    case _: {alias} = {n}",
    "{alias} = pickle.loads(pickle.dumps({list}))",
    "{alias} = [item for item in {list} if (held := item) is not None][:{n}]",
    "try:\n    {alias} = {any}\n    raise KeyError({n})\nexcept KeyError as error:\n    {alias} = error.args\n"
    "finally:\n    {list}.append('done')",
    "with contextlib.ExitStack() as stack:\n    stack.callback({list}.append, {n})\n    {alias} = {any}",
    "async def later(v): return v\n{alias} = await later({any})",
    "import json; {alias} = json.loads(json.dumps({{'n': {n}, 'l': [{n}]}}))",
    "{alias} = functools.reduce(lambda a, b: a + [b], range({n}), [])",
)

ERRORS = (
    "raise ValueError('stop {n}')",
    "undefined_{n}",
    "1 / 0",
    "raise KeyboardInterrupt",
    "assert {n} < 4, 'large'",
    "{any}.missing",
    "raise RuntimeError({any})",
    "for {v} in range(3):\n    {alias} = [{v}, {any}]\n    if {v} == 1: raise StopIteration",
)
