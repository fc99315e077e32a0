"""mmlab's batches in Lightning. Follow it with `mmlab watch runs/lightning`.

python examples/lightning_module.py
"""

import torch
from _small_clip import collate, dataset, small_clip
from lightning.pytorch import LightningModule, Trainer

import mmlab
from mmlab.integrations import LightningEvents, PlannedDataModule


class Clip(LightningModule):
    """CLIP with its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_clip()

    def training_step(self, batch: dict, _: int) -> torch.Tensor:
        """The loss of a batch."""
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all weights."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


scheduler = mmlab.make_scheduler("budget", budget=1500)
data = PlannedDataModule(dataset, scheduler, collate_fn=collate)  # 1
trainer = Trainer(
    max_epochs=3,
    accelerator="auto",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    use_distributed_sampler=False,  # 2
    callbacks=[LightningEvents("runs/lightning")],  # 3
)
trainer.fit(Clip(), datamodule=data)
