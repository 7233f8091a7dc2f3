# Dataclasses of a cell on workers and of the notebook extend one another, and their fields are looked at.
# outcome: equal
# compare: results
# runs: always

# %% accelerate
import dataclasses
import inspect


@dataclasses.dataclass
class Settings:
    width: int
    depth: int = 2
    names: list = dataclasses.field(default_factory=list)
    options: dict = dataclasses.field(default_factory=dict, kw_only=True)


# %%
@dataclasses.dataclass
class Further(Settings):
    rate: float = 0.1


# %% accelerate
@dataclasses.dataclass
class Last(Further):
    note: str = "none"


required = [field.default is dataclasses.MISSING for field in dataclasses.fields(Further)]

# %%
results = [
    required,
    [field.default_factory is dataclasses.MISSING for field in dataclasses.fields(Last)],
    *(dataclasses.asdict(kind(3)) for kind in (Settings, Further, Last)),
    *(str(inspect.signature(kind)) for kind in (Settings, Further, Last)),
]
