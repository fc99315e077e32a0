"""mmlab's batches in your own loop with accelerate. Follow it with `mmlab watch runs/accelerate`.

python examples/accelerate_loop.py
accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py
"""

import torch
from _small_clip import collate, dataset, small_clip
from accelerate import Accelerator
from torch.utils.data import DataLoader

import mmlab
from mmlab.integrations import PlannedSampler, RunWriter, prepare_loader

NUM_EPOCHS = 3

accelerator, model = Accelerator(), small_clip()
sampler = PlannedSampler(dataset, mmlab.make_scheduler("budget", budget=1500), num_epochs=NUM_EPOCHS)  # 1
loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
loader = prepare_loader(accelerator, loader)  # 2
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

with RunWriter("runs/accelerate", sampler=sampler, num_steps=NUM_EPOCHS * len(sampler)) as run:  # 3
    for epoch in range(NUM_EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            run.begin_step()  # the batch is here: until now the loop waited for data
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss.item())
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")
