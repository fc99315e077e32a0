"""Article B's recipe: batches of 32 from a DataLoader with 4 workers and pinned memory, AMP with a gradient scaler,
AdamW at 1e-4, accumulation over 8 steps.

    python examples/article_b.py [DATA]

First its loop, which steps on the wrong micro-batches; then the trainer, which needs no loop. On a CPU, AMP's fp16 is
replaced by bf16, which needs no scaler.
"""

import sys

import torch
from torch.utils.data import DataLoader

import mmlab
from mmlab.training.losses.contrastive import Contrastive

device = "cuda" if torch.cuda.is_available() else "cpu"
records = mmlab.read_records(sys.argv[1] if len(sys.argv) > 1 else "data/sample", progress=False)[:256]
dataset = mmlab.MultimodalDataset(records, image_policy=mmlab.parse_image_policy("square:96"))
model = mmlab.build_model("tiny", vocab_size=len(dataset.tokenizer)).to(device)
objective = Contrastive()

print("The article's loop")
loader = DataLoader(
    dataset, batch_size=32, shuffle=True, num_workers=4, pin_memory=device == "cuda", persistent_workers=True
)
optimizer, scaler = (
    torch.optim.AdamW(model.parameters(), lr=1e-4),
    torch.amp.GradScaler(device, enabled=device == "cuda"),
)
num_stepped = 0
for index, batch in enumerate(loader):
    with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
        batch = batch.to(device)
        loss = objective(model(batch), batch) / objective.count(batch) / 8
    scaler.scale(loss).backward()
    if index % 8 == 0:  # the fault: the first step has seen one micro-batch, and the last ones are never used
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        num_stepped = index + 1
print(f"  {num_stepped} of {len(loader)} micro-batches reached the weights")

print("The same in mmlab")
precision = "fp16" if device == "cuda" else "bf16"
trainer = mmlab.FusionTrainer(model, device=device, lr=1e-4, precision=precision, accumulation_steps=8)
steps = trainer.fit(mmlab.PlannedLoader(dataset, mmlab.make_scheduler("bucket", batch_size=32)))
print(
    f"  {sum(step['num_batches'] for step in steps)} micro-batches in {len(steps)} steps, loss {steps[-1]['loss']:.3f}"
)
