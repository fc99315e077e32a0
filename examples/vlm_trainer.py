"""Fine-tune a vision-language model on conversations, in batches planned from sizes alone, in transformers' Trainer.

python examples/vlm_trainer.py [--data talks.json --images FOLDER] [--model NAME_OR_PATH]

Without arguments: questions about the bundled scenes, and a small Qwen2-VL with random weights, of which nothing is
downloaded. Follow it with `mmlab watch runs/vlm_trainer`.
"""

import argparse
from pathlib import Path
from typing import Any

from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainingArguments

import mmlab
from mmlab.integrations import ConversationCollator, PlannedBatches, TrainerEvents


class PlannedTrainer(PlannedBatches, Trainer):  # 1
    """A Trainer whose batches come from a plan."""


def bundled_talks() -> list[dict[str, Any]]:
    """A question about each bundled caption, in LLaVA's form."""
    records = mmlab.read_records("data/sample", progress=False)
    return [
        {
            "id": record.id,
            "image": str(Path(record.image_path).resolve()),
            "conversations": [
                {"from": "human", "value": "<image>\nDescribe the image."},
                {"from": "gpt", "value": record.text},
            ],
        }
        for record in records
    ]


def small_model() -> tuple[Any, Any]:
    """A Qwen2-VL with its processor from configurations, its tokenizer trained on the spot."""
    from _small_qwen import small_qwen

    return small_qwen([talk["conversations"][1]["value"] for talk in bundled_talks()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="conversations: JSON, JSON Lines or Parquet")
    parser.add_argument("--images", help="folder of their images, where it is not the file's own")
    parser.add_argument("--model", help="name on the hub, or a folder")
    parser.add_argument("--budget", type=float, default=4000, help="padded tokens and patches a batch")
    options = parser.parse_args()

    talks = mmlab.read_conversations(options.data or bundled_talks(), images=options.images)
    if options.model:
        processor = AutoProcessor.from_pretrained(options.model)
        model = AutoModelForImageTextToText.from_pretrained(options.model)
    else:
        processor, model = small_model()

    arguments = {
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
    }
    trainer = PlannedTrainer(
        model,
        TrainingArguments("runs/vlm_trainer", remove_unused_columns=False, **arguments),
        train_dataset=talks,
        data_collator=ConversationCollator(processor),
        processing_class=processor,  # sizes follow from it, before a pixel is decoded
        scheduler=mmlab.make_scheduler("budget", budget=options.budget),  # 2
        callbacks=[TrainerEvents()],  # 3
    )
    trainer.train()
