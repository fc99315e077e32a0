"""Small vision-language models of many families: from configurations, with tokenizers trained on the spot and real processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'image' %}IMAGE"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "What is left of the red circle?\n\nA blue square is left of it.",
    "Count them. There are two, I think.",
]
SIDE = 32  # of a tile, pixels
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": SIDE, "patch_size": 8,
}  # fmt: skip


def tokenizer(*special: str, bos: str | None = None, **named: str) -> Any:
    """A byte-level BPE with a few special tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    known = [
        "<pad>",
        "<eos>",
        "<|im_start|>",
        "<|im_end|>",
        *([bos] if bos else []),
        *special,
        *named.values(),
    ]
    trained.train_from_iterator(
        TEXTS * 5,
        trainers.BpeTrainer(
            vocab_size=360,
            special_tokens=known,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=trained,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token=bos,
        extra_special_tokens=named,
    )


def llava() -> tuple[Any, Any]:
    words = tokenizer("<image>")
    size = {"height": SIDE, "width": SIDE}
    images = hf.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size)
    processor = hf.LlavaProcessor(
        images, words, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=CHATML.replace("IMAGE", "<image>\n"),
    )  # fmt: skip
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=hf.LlamaConfig(**TEXT, vocab_size=len(words)),
        image_token_id=words.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    return processor, hf.LlavaForConditionalGeneration(config)


def llava_onevision() -> tuple[Any, Any]:
    words = tokenizer("<image>", "<video>")
    pins = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE], [SIDE, SIDE]]
    images = hf.LlavaOnevisionImageProcessor(size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=pins)
    processor = hf.LlavaOnevisionProcessor(
        images, words, hf.LlavaOnevisionVideoProcessor(), num_image_tokens=16, vision_feature_select_strategy="full",
        # as the family's own: a space after the role, which the prompt for an answer lacks
        chat_template=CHATML.replace("IMAGE", "<image>\n").replace("{{ m.role }}\n", "{{ m.role }} \n"),
    )  # fmt: skip
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=hf.Qwen2Config(**TEXT, vocab_size=len(words)), image_grid_pinpoints=pins,
        image_token_id=words.convert_tokens_to_ids("<image>"), video_token_id=words.convert_tokens_to_ids("<video>"),
        vision_feature_select_strategy="full",
    )  # fmt: skip
    return processor, hf.LlavaOnevisionForConditionalGeneration(config)


def _qwen(name: str, vision: dict[str, Any], text: dict[str, Any], patch: int) -> tuple[Any, Any]:
    words = tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": 64 * (2 * patch) ** 2}
    images = hf.Qwen2VLImageProcessor(size=size, patch_size=patch, merge_size=2)
    videos = hf.Qwen2VLVideoProcessor() if name != "Qwen3VL" else hf.Qwen3VLVideoProcessor()
    template = CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    processor = getattr(hf, f"{name}Processor")(images, words, videos, chat_template=template)
    ids = {
        f"{key}_token_id": words.convert_tokens_to_ids(token)
        for key, token in {
            "image": "<|image_pad|>", "video": "<|video_pad|>",
            "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>",
        }.items()
    }  # fmt: skip
    config = getattr(hf, f"{name}Config")(
        vision_config=vision, text_config={**TEXT, **text, "vocab_size": len(words)}, **ids
    )
    return processor, getattr(hf, f"{name}ForConditionalGeneration")(config)


def qwen2_vl() -> tuple[Any, Any]:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 14}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    return _qwen("Qwen2VL", vision, {"rope_parameters": rope}, 14)


def qwen3_vl() -> tuple[Any, Any]:
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 16,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4, "mrope_interleaved": True}
    return _qwen("Qwen3VL", vision, {"head_dim": 8, "rope_parameters": rope}, 16)


def _idefics(name: str) -> tuple[Any, Any]:
    words = tokenizer(
        "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
        *(f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)),
    )  # fmt: skip
    options = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    images = getattr(hf, f"{name}ImageProcessor")(**options)
    videos = [hf.SmolVLMVideoProcessor()] if name == "SmolVLM" else []
    processor = getattr(hf, f"{name}Processor")(
        images, words, *videos, image_seq_len=4, chat_template=CHATML.replace("IMAGE", "<image>")
    )
    config = getattr(hf, f"{name}Config")(
        vision_config=VISION, text_config=hf.LlamaConfig(**TEXT, vocab_size=len(words)), scale_factor=2,
        image_token_id=words.convert_tokens_to_ids("<image>"), pad_token_id=0,
    )  # fmt: skip
    return processor, getattr(hf, f"{name}ForConditionalGeneration")(config)


def idefics3() -> tuple[Any, Any]:
    return _idefics("Idefics3")


def smolvlm() -> tuple[Any, Any]:
    return _idefics("SmolVLM")


def paligemma() -> tuple[Any, Any]:
    words = tokenizer("<image>", bos="<bos>")
    images = hf.SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    images.image_seq_length = 16
    processor = hf.PaliGemmaProcessor(images, words)
    words.add_bos_token = False
    config = hf.PaliGemmaConfig(
        vision_config=hf.SiglipVisionConfig(**VISION, projection_dim=32, vision_use_head=False),
        text_config=hf.GemmaConfig(**TEXT, vocab_size=len(words), head_dim=8), projection_dim=32,
        image_token_id=words.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    return processor, hf.PaliGemmaForConditionalGeneration(config)


def internvl() -> tuple[Any, Any]:
    words = tokenizer(
        "<video>", start_image_token="<img>", end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>", video_token="<video>",
    )  # fmt: skip
    images = hf.GotOcr2ImageProcessor(
        size={"height": SIDE, "width": SIDE}, crop_to_patches=True, min_patches=1, max_patches=6
    )
    processor = hf.InternVLProcessor(
        images, words, hf.InternVLVideoProcessor(), image_seq_length=4,
        chat_template=CHATML.replace("IMAGE", "<IMG_CONTEXT>\n"),
    )  # fmt: skip
    config = hf.InternVLConfig(
        vision_config={**VISION, "image_size": [SIDE, SIDE], "patch_size": [8, 8]},
        text_config=hf.Qwen2Config(**TEXT, vocab_size=len(words)),
        image_token_id=words.convert_tokens_to_ids("<IMG_CONTEXT>"), downsample_ratio=0.5,
    )  # fmt: skip
    return processor, hf.InternVLForConditionalGeneration(config)


def gemma3() -> tuple[Any, Any]:
    words = tokenizer(
        bos="<bos>",
        image_token="<image_soft_token>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
    )
    images = hf.Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE})
    processor = hf.Gemma3Processor(
        images, words, image_seq_length=4, chat_template="<bos>" + CHATML.replace("IMAGE", "<start_of_image>")
    )
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=hf.Gemma3TextConfig(**TEXT, vocab_size=len(words), head_dim=8),
        image_token_id=words.convert_tokens_to_ids("<image_soft_token>"), mm_tokens_per_image=4,
        boi_token_index=words.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=words.convert_tokens_to_ids("<end_of_image>"),
    )  # fmt: skip
    return processor, hf.Gemma3ForConditionalGeneration(config)


def blip_2() -> tuple[Any, Any]:
    words = tokenizer("<image>")
    images = hf.BlipImageProcessor(size={"height": SIDE, "width": SIDE})
    processor = hf.Blip2Processor(images, words, num_query_tokens=4)
    processor.chat_template = CHATML.replace("IMAGE", "")  # it puts the image first by itself
    queries = {key: size for key, size in TEXT.items() if key != "num_key_value_heads"}
    config = hf.Blip2Config(
        vision_config=VISION, num_query_tokens=4, image_token_id=words.convert_tokens_to_ids("<image>"),
        qformer_config={**queries, "encoder_hidden_size": 32},
        text_config=hf.OPTConfig(
            vocab_size=len(words), hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
            word_embed_proj_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        ),
    )  # fmt: skip
    return processor, hf.Blip2ForConditionalGeneration(config)


def mistral_3() -> tuple[Any, Any]:
    """Images of their own size, with a token at the end of each row."""
    words = tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    images = hf.PixtralImageProcessor(patch_size={"height": 8, "width": 8}, size={"longest_edge": 64})
    processor = hf.PixtralProcessor(
        images, words, patch_size=8, spatial_merge_size=2, chat_template=CHATML.replace("IMAGE", "[IMG]")
    )
    config = hf.Mistral3Config(
        vision_config=hf.PixtralVisionConfig(**{**VISION, "image_size": 64}), spatial_merge_size=2,
        text_config=hf.MistralConfig(**TEXT, vocab_size=len(words)),
        image_token_index=words.convert_tokens_to_ids("[IMG]"),
    )  # fmt: skip
    return processor, hf.Mistral3ForConditionalGeneration(config)


def glm_4v() -> tuple[Any, Any]:
    words = tokenizer(
        "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
        image_token="<|image|>", video_token="<|video|>",
    )  # fmt: skip
    size = {"shortest_edge": 2 * 28**2, "longest_edge": 64 * 28**2}
    template = CHATML.replace("IMAGE", "<|begin_of_image|><|image|><|end_of_image|>")
    processor = hf.Glm4vProcessor(
        hf.Glm4vImageProcessor(size=size), words, hf.Glm4vVideoProcessor(), chat_template=template
    )
    rope = {
        "rope_type": "default",
        "mrope_section": [1, 1, 2],
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
    }
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 14,
    }  # fmt: skip
    ids = {
        f"{kind}{key}_token_id": words.convert_tokens_to_ids(token.format(kind))
        for kind in ("image", "video")
        for key, token in {"": "<|{}|>", "_start": "<|begin_of_{}|>", "_end": "<|end_of_{}|>"}.items()
    }
    config = hf.Glm4vConfig(
        vision_config=vision, text_config={**TEXT, "rope_parameters": rope, "vocab_size": len(words)}, **ids
    )
    return processor, hf.Glm4vForConditionalGeneration(config)


def gemma_4() -> tuple[Any, Any]:
    """Images of their own proportions, their patches padded to one number."""
    words = tokenizer(
        bos="<bos>", image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>", video_token="<|video|>",
        audio_token="<|audio|>", boa_token="<|audio>", eoa_token="<audio|>",
    )  # fmt: skip
    images = hf.Gemma4ImageProcessor(patch_size=8, max_soft_tokens=70, pooling_kernel_size=2)
    processor = hf.Gemma4Processor(
        hf.Gemma4AudioFeatureExtractor(), images, words, hf.Gemma4VideoProcessor(), image_seq_length=70,
        chat_template="<bos>" + CHATML.replace("IMAGE", "<|image|>"),
    )  # fmt: skip
    text = {
        **TEXT, "vocab_size": len(words), "vocab_size_per_layer_input": len(words), "head_dim": 8, "global_head_dim": 8,
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    vision = {
        **VISION, "num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 256,
    }  # fmt: skip
    config = hf.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=words.image_token_id,
        boi_token_id=words.boi_token_id, eoi_token_id=words.eoi_token_id,
    )  # fmt: skip
    return processor, hf.Gemma4ForConditionalGeneration(config)


def ovis_2() -> tuple[Any, Any]:
    """A vocabulary of visual words, and tokens around each tile."""
    marks = ("<img>", "</img>", "<pre>", "<col>", "<row>")
    words = tokenizer("<image>", "<IMG_ATOM>", *marks)
    images = hf.Ovis2ImageProcessor(size={"height": SIDE, "width": SIDE}, crop_to_patches=True, max_patches=4)
    processor = hf.Ovis2Processor(
        images, words, image_seq_length=4, chat_template=CHATML.replace("IMAGE", "<image>\n")
    )
    vision = {**VISION, "vocab_size": 20, "num_visual_indicator_tokens": 5, "hidden_stride": 2}
    config = hf.Ovis2Config(
        vision_config=vision, text_config=hf.Qwen2Config(**TEXT, vocab_size=len(words)), vocab_size=len(words),
        hidden_size=32, image_token_id=words.convert_tokens_to_ids("<IMG_ATOM>"),
        visual_indicator_token_ids=words.convert_tokens_to_ids(list(marks)),
    )  # fmt: skip
    return processor, hf.Ovis2ForConditionalGeneration(config)


def lfm2_vl() -> tuple[Any, Any]:
    """Layers of convolution among those of attention."""
    rows = (f"<|img_row_{row}_col_{col}|>" for row in range(1, 5) for col in range(1, 5))
    words = tokenizer(
        *rows, image_token="<image>", image_start_token="<|image_start|>", image_end_token="<|image_end|>",
        image_thumbnail="<|img_thumbnail|>",
    )  # fmt: skip
    images = hf.Lfm2VlImageProcessor(
        tile_size=64, encoder_patch_size=8, min_image_tokens=4, max_image_tokens=16, max_tiles=4,
        size={"height": 64, "width": 64},
    )  # fmt: skip
    processor = hf.Lfm2VlProcessor(images, words, chat_template=CHATML.replace("IMAGE", "<image>"))
    vision = {key: size for key, size in VISION.items() if key != "image_size"}
    config = hf.Lfm2VlConfig(
        vision_config=hf.Siglip2VisionConfig(**vision, num_patches=64, vision_use_head=False),
        text_config=hf.Lfm2Config(**TEXT, vocab_size=len(words), layer_types=["conv", "full_attention"]),
        image_token_id=words.image_token_id, downsample_factor=2, projector_hidden_size=32,
    )  # fmt: skip
    return processor, hf.Lfm2VlForConditionalGeneration(config)


def llama_4() -> tuple[Any, Any]:
    """Its processor makes pixels in bf16, whatever the model's precision. Not among the families."""
    marks = ("image_start", "image_end", "patch", "tile_x_separator", "tile_y_separator")
    words = tokenizer("<|image|>", *(f"<|{mark}|>" for mark in marks))
    processor = hf.Llama4Processor(
        hf.Llama4ImageProcessor(size={"height": SIDE, "width": SIDE}, max_patches=4), words, patch_size=8,
        chat_template=CHATML.replace("IMAGE", "<|image|>"),
    )  # fmt: skip
    text = {
        **TEXT, "vocab_size": len(words), "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2,
        "interleave_moe_layer_step": 2,
    }  # fmt: skip
    vision = {
        **VISION, "intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32,
        "vision_output_dim": 32,
    }  # fmt: skip
    config = hf.Llama4Config(
        text_config=text, vision_config=vision, image_token_index=words.convert_tokens_to_ids("<|patch|>")
    )
    return processor, hf.Llama4ForConditionalGeneration(config)


def florence_2() -> tuple[Any, Any]:
    """An encoder-decoder: the question is read with the image, the answer is written."""
    words = tokenizer(bos="<bos>", image_token="<image>")
    images = hf.CLIPImageProcessor(size={"height": SIDE, "width": SIDE}, do_center_crop=False)
    images.image_seq_length = 5
    processor = hf.Florence2Processor(images, words)
    vision = {
        "depths": (1, 1), "patch_size": (7, 3), "patch_stride": (4, 4), "patch_padding": (3, 1), "window_size": 2,
        "patch_prenorm": (False, True), "embed_dim": (8, 16), "num_heads": (2, 2), "num_groups": (2, 2),
        "projection_dim": 32, "drop_path_rate": 0.0,
    }  # fmt: skip
    text = hf.BartConfig(
        vocab_size=len(words), d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=256, dropout=0.0, pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=1, bos_token_id=words.bos_token_id,
    )  # fmt: skip
    config = hf.Florence2Config(vision_config=vision, text_config=text, image_token_id=words.image_token_id)
    return processor, hf.Florence2ForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "LLaVA": llava,
    "LLaVA-OneVision": llava_onevision,
    "Qwen2-VL": qwen2_vl,
    "Qwen3-VL": qwen3_vl,
    "Idefics3": idefics3,
    "SmolVLM": smolvlm,
    "PaliGemma": paligemma,
    "InternVL": internvl,
    "Gemma 3": gemma3,
    "Mistral 3": mistral_3,
    "GLM-4V": glm_4v,
    "Gemma 4": gemma_4,
    "Ovis2": ovis_2,
    "LFM2-VL": lfm2_vl,
    "BLIP-2": blip_2,
    "Florence-2": florence_2,
}


def build(name: str) -> tuple[Any, Any]:
    """Processor and model of a family, with the same weights every time."""
    torch.manual_seed(0)
    return FAMILIES[name]()
