"""What `%accelerate plan` finds in a notebook's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accel_nb.errors import ConfigError
from accel_nb.forecast.memory import MemoryUsage
from accel_nb.forecast.plans import Forecast
from accel_nb.forecast.request import read_request
from accel_nb.forecast.table import as_text
from accel_nb.notebook.reports.forecasting import forecast_notebook
from tests.ranks.mesh_models import VOCABULARY, WIDTH, Mixture, gpt
from tests.support.transformer import Transformer


def ask_for(world: int, line: str, names: dict[str, Any]) -> Forecast | None:
    request = read_request(line.split(), "%accelerate plan", in_notebook=True)
    return forecast_notebook(request, names, request.config({}), ["cpu"] * world)


def ask(line: str, **names: Any) -> Forecast | None:
    return ask_for(2, line, names)


def loader(batch_size: int = 16) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randint(64, (40, 16)), torch.randint(64, (40, 16))), batch_size, shuffle=True)


def test_the_only_model_its_optimizer_and_the_only_loader_are_found() -> None:
    model = Transformer()
    other = nn.Linear(2, 2)
    found = ask(
        "",
        model=model,
        again=model,
        block=model.blocks[0],
        loss_fn=nn.CrossEntropyLoss(),
        wrong=torch.optim.SGD(other.parameters(), 0.1),
        optimizer=torch.optim.RMSprop(model.parameters()),
        data=loader(),
    )
    assert found is not None
    assert (found.model.name, found.model.optimizer) == ("Transformer", "RMSprop")
    assert (found.setting.batch_size, found.setting.samples_per_rank) == (16, 8)
    assert found.has_activations
    assert found.notes == ()


def test_names_and_sizes_that_are_given_go_first() -> None:
    names = {"model": Transformer(), "small": nn.Linear(16, 2), "a": loader(), "x": torch.randn(3, 16), "n": 3}
    assert ask("", **names) is None
    found = ask("small --data x --batch-size 100 --optimizer sgd", **names)
    assert found is not None
    assert (found.model.num_parameters, found.model.optimizer, found.setting.batch_size) == (34, "sgd", 100)
    assert ask("small --data x", **names).setting.batch_size == 3  # type: ignore[union-attr]
    assert not ask("model --data n --batch-size 3", **{**names, "n": [torch.ones(3)]}).has_activations  # type: ignore[union-attr]


def test_what_a_strategy_would_refuse_to_prepare_is_no_choice() -> None:
    model = Transformer()
    pair = torch.optim.AdamW(model.blocks.parameters()), torch.optim.AdamW(model.norm.parameters())
    refusals = []
    for names in ({"one": torch.optim.AdamW(model.parameters())}, {"one": pair[0], "other": pair[1]}):
        found = ask("", model=model, **names)
        assert found is not None
        refusals.append({plan.layout.name: plan.refusal for plan in found.plans if plan.refusal})
    why = "two optimizers step the Transformer, and stage 3 shards all of a model for one"
    assert refusals == [{}, {"zero 3": why}]


def test_a_loss_of_the_notebook_s_own_is_taken() -> None:
    names = {"model": nn.Linear(16, 2), "x": torch.randn(64, 16)}
    plain = ask("--data x", **names)
    heavy = ask("--data x --loss heavy", heavy=lambda output, batch: (output.repeat(1, 99).exp() + 1).sum(), **names)
    assert plain is not None
    assert heavy is not None
    assert heavy.plans[0].usage.activations > 5 * plain.plans[0].usage.activations


def test_looking_at_a_loader_moves_nothing() -> None:
    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.randn(16)

    model, data = nn.Linear(16, 2), DataLoader(Noisy(), 4, shuffle=True)
    state = torch.get_rng_state()
    found = ask("", model=model, data=data)
    assert found is not None
    assert found.has_activations
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("modle", "the notebook has no name 'modle'; did you mean model?"),
        ("x", "x is a Tensor; name a torch module"),
        ("model --data y", "--data: the notebook has no name 'y'"),
        ("model --data n", "--data n is a int without tensors"),
        ("model --data empty", "no sample can be read from"),
        ("model --data x --loss x", "--loss x is a Tensor"),
        ("model --data x --optimizer adamww", "did you mean adamw?"),
        ("model --cpu 2", "--cpu"),
    ],
)
def test_what_cannot_be_meant_is_refused(line: str, message: str) -> None:
    names = {"model": nn.Linear(16, 2), "x": torch.ones(2, 16), "n": 3, "empty": DataLoader([], 1)}  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as raised:
        ask(line, **names)
    assert message in str(raised.value)


def tokens() -> DataLoader[Any]:
    x = torch.randint(11, (40, 16))
    return DataLoader(TensorDataset(x, x), 16)


@pytest.mark.nightly
def test_meshes_are_compared_and_one_that_is_given_is_planned_alone() -> None:
    """Weights are those that a rank of the mesh holds; activations are divided where the mesh divides them."""
    model: Any = gpt()
    found = ask("", model=model, data=tokens())
    assert found is not None
    rows = {plan.name: plan.usage for plan in found.plans}
    assert {"tp 2", "pp 2", "cp 2", "fsdp (3) x cp 2"} <= rows.keys()
    held = lambda modules: sum(value.nbytes for value in {v for part in modules for v in part.parameters()})  # noqa: E731
    divided = [part for block in model.blocks for part in (block.attention, block.mlp)]
    whole_biases = sum(layer.bias.nbytes for block in model.blocks for layer in (block.attention.out, block.mlp[2]))
    in_parts = held(divided) - whole_biases
    assert rows["tp 2"].parameters == held([model]) - in_parts // 2
    assert rows["pp 2"].parameters == held([model]) - held([model.blocks[0]])
    assert rows["cp 2"].parameters == rows["ddp"].parameters == held([model])
    assert rows["fsdp (3) x cp 2"].parameters <= held([model]) // 2 + 8 * 9
    # Data parallel training divides all activations, a mesh those inside of blocks only, in pipelines by blocks.
    assert all(
        rows["ddp"].activations < rows[name].activations < 2 * rows["ddp"].activations for name in ("pp 2", "cp 2")
    )
    assert rows["cp 2"].sent_bytes > rows["ddp"].sent_bytes > 0
    assert found.best is not None
    assert found.best.name == "ddp"
    given = ask("--tp 2", model=model, data=tokens())
    assert given is not None
    assert [plan.name for plan in given.plans if not plan.is_checkpointed] == ["tp 2"]
    assert given.setting.samples_per_rank == 16
    assert given.best is not None
    assert given.best.options == {"strategy": "ddp", "mesh.tp": 2}
    assert "messages" in as_text(given)


def test_layers_and_experts_are_divided_before_the_rest_is_sharded() -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), gpt().blocks[0], Mixture(4), nn.Linear(WIDTH, VOCABULARY))
    usages: list[MemoryUsage] = []
    for line in ("--tp 2", "--tp 2 --ep 2"):
        found = ask_for(4, line, {"model": model, "data": tokens()})
        assert found is not None
        usages.append(next(plan.usage for plan in found.plans if plan.name.startswith("fsdp (3)")))
    of_layers, of_both = usages
    assert (of_both.parameters, of_both.optimizer) == (of_layers.parameters, of_layers.optimizer)


def test_a_mesh_that_is_refused_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 4)), 4)
    compared = ask("", model=model, data=data)
    assert compared is not None
    assert not any("p 2" in plan.name for plan in compared.plans)
    found = ask("--pp 2", model=model, data=data)
    assert found is not None
    assert found.best is None
    assert "pp 2 was not chosen: Sequential has batch normalization" in as_text(found)
    with pytest.raises(ConfigError, match="mesh pp 3: 3 does not divide 2 workers; use 1, 2"):
        ask("--pp 3", model=model, data=data)
