"""Where the rows of a call are, and why the calls of a model are not divided."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from accel_nb.accelerator.model_division.row_layout import DivisionRefusal, RowLayout, find_layout


class Recurrent(nn.Module):
    """Draws dropout between its layers for the steps of all samples behind one another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        _, (hidden, _) = self.layers(pack_padded_sequence(x, lengths, batch_first=True))
        return hidden[-1]


def test_dropout_of_packed_rows_is_the_reason_and_not_an_error_of_the_model() -> None:
    model, lengths = Recurrent(), torch.tensor([7, 6, 5, 4, 4, 3, 2, 1])
    args = (torch.randn(8, 7, 3), lengths)
    found = find_layout(model, model.forward, args, {}, batch_size=8, tolerance=1e-6, device="cpu")
    assert isinstance(found, DivisionRefusal)
    assert found.reason.endswith("in which the rows are not found")


def test_layers_with_random_slopes_draw_nothing_in_evaluation() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.RReLU()).eval()
    found = find_layout(model, model.forward, (torch.randn(8, 3),), {}, batch_size=8, tolerance=1e-6, device="cpu")
    assert isinstance(found, RowLayout)
    assert not found.has_draws
    assert found.random_problem is None
