# The backward pass of an operation asks for gradients of the parameters of a model, as adjoint methods of ODEs do.
# outcome: refused torch.autograd.grad with respect to parameters is not possible for a sharded model
# compare: model
# %%
import torch
from torch import nn


class Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, model, x, *parameters):
        ctx.model, ctx.num_parameters = model, len(parameters)
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return model(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            outputs = ctx.model(x)
            found = torch.autograd.grad(outputs, tuple(parameters), gradient, allow_unused=True)
        return None, None, *found


torch.manual_seed(0)
x, y = torch.randn(12, 3), torch.randn(12, 1)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

# %% accelerate --strategy fsdp
for _ in range(4):
    loss = nn.functional.mse_loss(Adjoint.apply(model, x, *model.parameters()), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
