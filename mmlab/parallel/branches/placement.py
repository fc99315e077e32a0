"""`BranchPlacement`: on which device each branch of a model lives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmlab.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPlacement:
    """Devices of the image branch, the text branch and the fusion with the losses.

    >>> BranchPlacement(image="cpu", text="cpu", fusion="cpu")
    BranchPlacement(image='cpu', text='cpu', fusion='cpu')

    Each branch is an encoder with its head; the text branch also tells hidden tokens, with the encoder's embedding.

    Raises:
        OptionError: no device of that name.
    """

    image: str = "cpu"
    text: str = "cpu"
    fusion: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("image", "text", "fusion"):
            object.__setattr__(self, name, str(_device(getattr(self, name))))

    @classmethod
    def of(cls, devices: list[str] | tuple[str, ...]) -> BranchPlacement:
        """From one device for all, two (image; text and fusion), or three (image, text, fusion).

        Raises:
            OptionError: another number of devices.
        """
        if not 1 <= len(devices) <= 3:
            raise OptionError(
                f"branches take one device, two (image; text and fusion) or three (image, text, fusion), "
                f"found {devices}"
            )
        return cls(image=devices[0], text=devices[min(1, len(devices) - 1)], fusion=devices[-1])

    @property
    def devices(self) -> list[torch.device]:
        """Those that are used, each once, the fusion's first."""
        return [torch.device(name) for name in dict.fromkeys((self.fusion, self.image, self.text))]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"{name!r} names no device: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", 0)
    return device
