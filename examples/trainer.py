"""mmlab's batches in transformers' Trainer. Follow it with `mmlab watch runs/trainer`.

python examples/trainer.py
"""

from _small_clip import collate, dataset, small_clip
from transformers import TrainingArguments

import mmlab
from mmlab.integrations import PlannedTrainer, TrainerEvents  # 1

options = {
    "num_train_epochs": 3,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
}
trainer = PlannedTrainer(
    small_clip(),
    TrainingArguments("runs/trainer", remove_unused_columns=False, **options),
    train_dataset=dataset,
    data_collator=collate,
    scheduler=mmlab.make_scheduler("budget", budget=1500),  # 2
    callbacks=[TrainerEvents()],  # 3
)
trainer.train()
