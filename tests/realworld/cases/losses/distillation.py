# Teacher and student: KL divergence of softened outputs (batchmean) and cross entropy with the labels.
# outcome: equal
# compare: student, teacher
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(44, 5), torch.randint(0, 4, (44,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
teacher = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 4))
student = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
T, alpha = 2.0, 0.3

# %% accelerate
teacher.eval()
student.train()
for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        with torch.no_grad():
            teacher_logits = teacher(inputs)
        student_logits = student(inputs)
        soft = F.kl_div(
            F.log_softmax(student_logits / T, dim=-1), F.softmax(teacher_logits / T, dim=-1), reduction="batchmean"
        ) * T ** 2
        loss = alpha * soft + (1 - alpha) * F.cross_entropy(student_logits, labels)
        loss.backward()
        optimizer.step()
