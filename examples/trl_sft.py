"""mmlab's batches in TRL's SFTTrainer, on the captions alone. Follow it with `mmlab watch runs/trl_sft`.

python examples/trl_sft.py
"""

from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel
from trl import SFTConfig, SFTTrainer

import mmlab
from mmlab.integrations import PlannedBatches, TrainerEvents


class PlannedSFTTrainer(PlannedBatches, SFTTrainer):  # 1
    """SFTTrainer whose batches come from a plan."""


records = mmlab.read_records("data/sample", progress=False)
tokenizer = mmlab.load_tokenizer("builtin", records=records)
tokenizer.eos_token = tokenizer.sep_token
ends = {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=len(tokenizer), **ends))
options = {
    "num_train_epochs": 3,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
}
trainer = PlannedSFTTrainer(
    model,
    SFTConfig("runs/trl_sft", bf16=False, gradient_checkpointing=False, **options),
    train_dataset=Dataset.from_dict({"text": records.texts}),
    processing_class=tokenizer,
    scheduler=mmlab.make_scheduler("budget", budget=400),  # 2; sizes are the lengths of the texts
    callbacks=[TrainerEvents()],  # 3
)
trainer.train()
