# A small model of transformers in a loop of one's own, batches as dicts, linear schedule with warm-up.
# outcome: equal
# compare: weights, rates
# needs: transformers
# %%
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

config = BertConfig(
    vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
data = [{"input_ids": torch.randint(0, 30, (6,)), "labels": torch.tensor(i % 2)} for i in range(24)]
loader = DataLoader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
scheduler = get_linear_schedule_with_warmup(optimizer, 2, 2 * len(loader))

# %% accelerate
rates = []
model.train()
for epoch in range(2):
    for batch in loader:
        batch = {k: v.to("cpu") for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
weights = {k: v.clone() for k, v in model.state_dict().items()}
