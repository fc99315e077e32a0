"""Fine-tune a vision-language model on conversations, in batches planned from sizes alone, in transformers' Trainer.

python examples/vlm_trainer.py [--data talks.json --images FOLDER] [--model NAME_OR_PATH]

Without arguments: questions about the bundled scenes, and a small Qwen2-VL with random weights; nothing is
downloaded. Follow it with `mmlab watch runs/vlm_trainer`.
"""

import argparse

import torch
from small_vlm import mixed_talks, small_qwen
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainingArguments

import mmlab
from mmlab.data import ConversationCollator
from mmlab.integrations import PlannedTrainer, TrainerEvents  # 1

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="conversations: JSON, JSON Lines or Parquet")
    parser.add_argument("--images", help="folder of their images, where it is not the file's own")
    parser.add_argument("--model", help="name on the hub, or a folder")
    parser.add_argument("--budget", type=float, default=4000, help="padded tokens and patches a batch")
    options = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(
        False
    )  # on a GPU, cuDNN's attention would build a plan for every new shape

    talks = mmlab.read_conversations(
        options.data or mixed_talks(mmlab.read_records("data/sample")), images=options.images
    )
    if options.model:
        processor = AutoProcessor.from_pretrained(options.model)
        model = AutoModelForImageTextToText.from_pretrained(options.model)
    else:
        processor, model = small_qwen([talk[-1]["content"][0]["text"] for talk in talks.messages])

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
