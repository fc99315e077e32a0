"""Article A's loop: the batch size follows the memory in use, epoch by epoch; batches are sorted by size.

    python examples/article_a.py [DATA]

Then the same data without its faults: batches planned in bytes before they are made, different in every
epoch.
"""

import sys

import mmlab

records = mmlab.read_records(sys.argv[1] if len(sys.argv) > 1 else "data/sample", progress=False)
dataset = mmlab.MultimodalDataset(records, image_policy=mmlab.parse_image_policy("aspect:96"))
model = mmlab.build_model("tiny", vocab_size=len(dataset.tokenizer))
trainer = mmlab.FusionTrainer(model, device="cpu", lr=1e-3)

print("As in the article")
resources, batch_size = mmlab.ResourceAwareScheduler(max_memory_gb=16), 8
for epoch in range(2):
    batch_size = resources.adjust_batch_size(batch_size)
    loader = mmlab.PlannedLoader(dataset, mmlab.BatchScheduler(batch_size))
    steps = trainer.fit(loader)
    print(f"  epoch {epoch}: batches of {batch_size}, {len(steps)} steps, loss {steps[-1]['loss']:.3f}")

print("Planned in bytes")
scheduler = mmlab.make_scheduler(
    "memory", cost=mmlab.fit_memory(model, device="cpu", progress=False), budget=64 * 2**20
)
loader = mmlab.PlannedLoader(dataset, scheduler)
for epoch in range(2):
    loader.set_epoch(epoch)
    steps = trainer.fit(loader)
    full = loader.plan.report().peak_over_budget
    print(
        f"  epoch {epoch}: {len(steps)} steps, the fullest at {full:.0%} of the limit, loss {steps[-1]['loss']:.3f}"
    )
