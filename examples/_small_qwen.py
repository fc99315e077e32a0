"""A small Qwen2-VL for the example of vision-language models: from configurations, its tokenizer trained on the spot."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *IMAGE, "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
    "{% if p.type == 'image' %}"
    + "".join(IMAGE)
    + "{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return processor, Qwen2VLForConditionalGeneration(config)
