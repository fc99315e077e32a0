"""The closed form from fourteen traces holds for larger batches, errs on the safe side, and knows a model's limits."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from mmlab.errors import OptionError
from mmlab.pricing.closed_form import fit_rows
from mmlab.pricing.fingerprint import fingerprint
from mmlab.pricing.fit import _candidates, _probes, fit_memory
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.trace import StepTracer
from mmlab.schedule.cost import batch_costs
from mmlab.training.losses.masked_language import MaskedLanguage
from mmlab.types import BatchShape
from tests.pricing.priced_models import tiny

MODEL = tiny()


@pytest.fixture(scope="module")
def memory():
    return fit_memory(MODEL, precision="bf16", num_held_out=3, progress=False)


@pytest.fixture(scope="module")
def tracer():
    return StepTracer(MODEL, precision="bf16")


def test_fourteen_probes_predict_batches_ten_times_larger(memory, tracer):
    probes = max(
        tracer(BatchShape(*map(int, shape))).peak_bytes
        for shape in _probes(_candidates(16, 512, None), 16)[:3]
    )
    largest = tracer(BatchShape(96, 200, 320, 320))
    assert largest.peak_bytes - largest.static_bytes > 10 * (probes - largest.static_bytes)
    assert memory.held_out["num_shapes"] == 3
    assert memory.held_out["p95_ratio"] <= 0.0025
    assert memory.held_out["worst_under_ratio"] <= 0.0025


@pytest.mark.parametrize(
    "shape",
    [
        (8, 64, 128, 128),
        (8, 63, 128, 128),
        (1, 40, 224, 224),
        (16, 8, 224, 224),
        (1, 1, 16, 16),
        (64, 96, 50, 70),
    ],
    ids=["lengths of 8", "one length of 8", "one sample", "mid", "least", "odd sides"],
)
def test_shapes_that_spare_operations_are_predicted_on_the_safe_side(memory, tracer, shape):
    found = tracer(BatchShape(*shape)).peak_bytes
    assert -0.0025 <= memory(BatchShape(*shape)) / found - 1 <= 0.02


def test_no_text_is_priced_too_low_where_a_whole_number_of_its_tokens_is_hidden():
    model = tiny(text_dim=32, hidden_dim=32, image_dim=32)
    setting = {"objectives": {"masked_language": MaskedLanguage(mask_id=4)}, "device": "cpu"}
    memory = fit_memory(model, num_held_out=0, progress=False, **setting)
    tracer = StepTracer(model, **setting)
    for shape in [BatchShape(256, num_tokens, 16, 16) for num_tokens in (4, 11, 24)]:
        assert memory(shape) >= 0.995 * tracer(shape).peak_bytes


def test_the_optimizers_step_is_the_least_that_is_needed(memory, tracer):
    assert memory(BatchShape(1, 1, 16, 16)) >= tracer.step_peak_bytes


def test_what_was_fitted_is_kept_with_it(memory, tmp_path):
    memory.save(tmp_path / "memory.json")
    asked = {"precision": "bf16", "device": "cuda", "checkpointing": False, "optimizer": "adamw"}
    loaded = MemoryModel.load(tmp_path / "memory.json", fingerprint=fingerprint(MODEL), conditions=asked)
    assert loaded(BatchShape(8, 20, 96, 96)) == memory(BatchShape(8, 20, 96, 96))
    other = fingerprint(tiny(dropout=0.1))
    with pytest.raises(OptionError, match="model: fitted for"):
        MemoryModel.load(tmp_path / "memory.json", fingerprint=other)


def test_probes_differ_and_keep_to_a_models_limits():
    probes = _probes(_candidates(32, 40, None), 32)
    assert len({tuple(shape) for shape in probes.tolist()}) == 14
    assert probes[:, 1].max() <= 40
    assert (probes[:, 1] % 8 == 1).all()
    assert (probes[:, 2] // 32 * (probes[:, 3] // 32) % 8 == 1).all()
    one_side = _probes(_candidates(16, 512, 224), 16)
    assert len(one_side) == 9
    assert set(one_side[:, 2]) == {224}


def test_a_transformers_model_keeps_to_its_texts_and_its_one_image_size():
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    vision = {
        "image_size": 64,
        "patch_size": 16,
        "depths": [1, 1, 1],
        "num_hidden_layers": 3,
        "num_group_tokens": [8, 4, 0],
    }
    config = transformers.GroupViTConfig(
        text_config={**small, "num_hidden_layers": 1, "vocab_size": 99, "max_position_embeddings": 40,
                     "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**small, **vision, "num_output_groups": [8, 4, 0]},
    )  # fmt: skip
    memory = fit_memory(transformers.GroupViTModel(config), num_held_out=1, progress=False)
    assert not memory.rows.exponents[:, 2].any()
    assert memory.held_out["worst_under_ratio"] <= 0.0025
    assert memory.patch == 16
    assert memory.conditions["image_size"] == 64


class Texts(nn.Module):
    """A loss over texts, in which `steps(T)` operations depend on the length."""

    def __init__(self, steps):
        super().__init__()
        self.table, self.steps = nn.Embedding(50, 64), steps

    def forward(self, input_ids, attention_mask):
        features = self.table(input_ids)
        for _ in range(self.steps(input_ids.shape[1])):
            features = torch.tanh(features)
        return SimpleNamespace(loss=(features * attention_mask[..., None]).mean())


def test_operations_that_some_shapes_spare_are_aligned():
    memory = fit_memory(Texts(lambda length: 4 + (length > 20)), num_held_out=4, progress=False)
    assert memory.held_out["worst_under_ratio"] <= 0.0025


def test_without_a_text_or_patch_in_its_configuration_the_usual_ones_are_taken():
    memory = fit_memory(Texts(lambda length: 2), num_held_out=2, progress=False)
    assert memory.patch == 16
    assert memory.held_out["p95_ratio"] <= 0.0025
    shapes = np.array([[4, 30, 96, 96], [8, 30, 96, 96]])
    assert batch_costs(memory, shapes)[1] > batch_costs(memory, shapes)[0]


def test_too_few_probes_are_refused():
    shapes = _candidates(16, 512, None)[:200:40]
    with pytest.raises(OptionError, match="terms need as many traced shapes, found 5"):
        fit_rows(shapes, shapes)
    with pytest.raises(OptionError, match="num_held_out must be at least 0, found -1"):
        fit_memory(Texts(lambda length: 2), num_held_out=-1, progress=False)
    with pytest.raises(OptionError, match="patch must be at least 1, found 0"):
        fit_memory(Texts(lambda length: 2), patch=0, progress=False)
    with pytest.raises(
        OptionError, match="unknown option of a step 'checkpoint'; did you mean 'checkpointing'"
    ):
        fit_memory(Texts(lambda length: 2), checkpoint=True, progress=False)
    with pytest.raises(OptionError, match=r"model must be a torch.nn.Module.*, found 'tiny'"):
        fit_memory("tiny", progress=False)  # type: ignore[arg-type]
