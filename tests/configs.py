"""Parts of configurations that several tests train with."""

from __future__ import annotations

TINY_MODEL = """[model]
preset = "tiny"
image_dim = 32
image_depth = 1
text_dim = 32
text_depth = 1
hidden_dim = 32
embed_dim = 16
"""

# formatted with the folder of scenes; options of the trainer may follow
BUDGET_RUN = (
    """
[data]
path = "{scenes}"
image = "aspect:32"
num_workers = 0
"""
    + TINY_MODEL
    + """[scheduler]
name = "budget"
budget = 400
[trainer]
device = "cpu"
"""
)
