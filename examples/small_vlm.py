"""Stand-ins for your conversations and your vision-language model, small enough to train on any machine.

    python examples/small_vlm.py SCENES FOLDER

SCENES is a folder that `mmlab data make` wrote. FOLDER/talks.json then holds conversations about its images,
in LLaVA's format, and FOLDER/model a Qwen2-VL with random weights and its processor, as `from_pretrained`
reads them. Nothing is downloaded.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

import mmlab
from mmlab import Records

IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *IMAGE, "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
    "{% if p.type == 'image' %}"
    + "".join(IMAGE)
    + "{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def mixed_talks(records: Records) -> list[dict[str, Any]]:
    """A conversation about each image, in LLaVA's format: its answer is the captions of 1 to 40 images."""
    firsts = records.select(np.unique(records.group, return_index=True)[1])  # one caption of each image
    rng, rows = np.random.default_rng(0), []
    for row, record in enumerate(firsts):
        count = int(np.clip(rng.lognormal(0.7, 1.1), 1, 40))
        told = " ".join(str(firsts.texts[(row + step) % len(firsts)]) for step in range(count))
        turns = [{"from": "human", "value": "<image>\nTell."}, {"from": "gpt", "value": told}]
        rows.append({"image": str(Path(record.image_path).resolve()), "conversations": turns})
    return rows


def small_qwen(texts: list[str]) -> tuple[Any, Any]:
    """Processor and model with random weights, for texts like these."""
    byte_pairs = Tokenizer(models.BPE())
    byte_pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    byte_pairs.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs, pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    image_processor = Qwen2VLImageProcessor(size={"shortest_edge": 56**2, "longest_edge": 112**2})
    processor = Qwen2VLProcessor(image_processor, tokenizer, Qwen2VLVideoProcessor(), chat_template=TEMPLATE)
    start, image, end, video = tokenizer.convert_tokens_to_ids([*IMAGE, "<|video_pad|>"])
    config = Qwen2VLConfig(
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4},
        text_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": len(tokenizer),
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return processor, Qwen2VLForConditionalGeneration(config)


def main() -> None:
    """Write the conversations and the model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scenes", help="folder of generated scenes")
    parser.add_argument("folder", type=Path, help="to write to")
    options = parser.parse_args()
    talks = mixed_talks(mmlab.read_records(options.scenes, progress=False))
    torch.manual_seed(0)
    for part in small_qwen([talk["conversations"][1]["value"] for talk in talks]):
        part.save_pretrained(options.folder / "model")
    (options.folder / "talks.json").write_text(json.dumps(talks, indent=1), "utf-8")


if __name__ == "__main__":
    main()
