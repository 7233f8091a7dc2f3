import time, sys, torch
from torch import nn
from accel_nb.accelerator import Accelerator
from tests.ranks.launch import run_ranks

def parts():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)

def data(n):
    g = torch.Generator().manual_seed(n)
    return torch.randn(8, 5, generator=g), torch.randn(8, 3, generator=g)

def train(world, stage, strategy="deepspeed"):
    t=time.time()
    model, opt = parts()
    ids = list(map(id, model.parameters()))
    a = Accelerator(world=world, cpu=True, strategy=strategy, config={"deepspeed": {"zero_stage": stage, "persistent_size": 0}} if strategy=="deepspeed" else {})
    t1=time.time()
    a.prepare(model, opt)
    t2=time.time()
    for n in range(4):
        x, y = data(n)
        loss = nn.functional.mse_loss(model(x[world.rank::world.size]), y[world.rank::world.size])
        a.backward(loss)
        opt.step(); opt.zero_grad()
    t3=time.time()
    held = sum(p.numel() for p in model.parameters())
    a.close()
    print(t1-t, t2-t1, t3-t2, file=sys.stderr)
    st = {i: {k: v.shape for k, v in s.items()} for i, s in opt.state_dict()["state"].items()}
    return torch.cat([p.detach().flatten() for p in model.parameters()]), held, ids == list(map(id, model.parameters())), st, [list(vars(m)) for m in model.modules()], [vars(p) for p in model.parameters()]

def main():
    model, opt = parts()
    for n in range(4):
        x, y = data(n)
        nn.functional.mse_loss(model(x), y).backward()
        opt.step(); opt.zero_grad()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for stage in (1, 2, 3):
        for size in (2, 3):
            t=time.time()
            r = run_ranks(train, size, stage)
            print(stage, size, [float((x[0]-expected).abs().max()) for x in r], r[0][1:3], time.time()-t)
    print(r[0][3], r[0][4], r[0][5])

if __name__ == "__main__":
    from tests.ranks import try_zero
    try_zero.main()
