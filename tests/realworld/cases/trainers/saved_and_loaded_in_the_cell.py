# A model of transformers is saved after each epoch, and the saved one is loaded in the same cell and afterwards.
# outcome: equal
# compare: model, loaded, later
# needs: transformers
# %%
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
model = BertForSequenceClassification(config).to(torch.get_default_dtype())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randint(0, 50, (24, 7)), torch.randint(0, 2, (24,))), batch_size=8)
loaded = []

# %% accelerate
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x).logits, y).backward()
        optimizer.step()
    model.save_pretrained(f"epoch-{epoch}")
    loaded.append(BertForSequenceClassification.from_pretrained(f"epoch-{epoch}").state_dict())

# %%
later = BertForSequenceClassification.from_pretrained("epoch-1").state_dict()
