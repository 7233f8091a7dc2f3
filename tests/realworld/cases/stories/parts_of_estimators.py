# Estimators whose class defines `__getstate__`, as scikit-learn's does, hold callbacks and each other; other names do too.
# outcome: equal
# compare: stopper.calls, regressor.callbacks[0] is stopper, pipe.steps[0][1] is regressor, regressor.history, recorder.seen
# runs: always

# %%
import torch


class Estimator:
    def __getstate__(self):
        return {**vars(self), "_version": "1.0"}

    def __setstate__(self, state):
        self.__dict__.update({name: value for name, value in state.items() if name != "_version"})


class Regressor(Estimator):
    def __init__(self, callbacks=()):
        self.callbacks = list(callbacks)
        self.history = []

    def fit(self, x, y):
        self.model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for _ in range(3):
            loss = ((self.model(x) - y) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.history.append(loss.item())
            for callback in self.callbacks:
                callback(self.history)


class Pipeline(Estimator):
    def __init__(self, steps, memory=None):
        self.steps, self.memory = steps, memory

    def fit(self, x, y):
        for _, step in self.steps:
            step.fit(x, y)


class Stopper:
    def __init__(self):
        self.calls = 0

    def __call__(self, history):
        self.calls += 1


class Recorder:
    def __init__(self):
        self.seen = []

    def __call__(self, history):
        self.seen.append(history[-1])


torch.manual_seed(0)
x, y = torch.randn(10, 3), torch.randn(10, 1)
stopper, recorder = Stopper(), Recorder()
regressor = Regressor([stopper, recorder])
pipe = Pipeline([("regressor", regressor)])

# %% accelerate
pipe.fit(x, y)

# %%
print(stopper.calls, len(recorder.seen), regressor.history)
