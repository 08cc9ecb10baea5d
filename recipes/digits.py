"""The classic two-convolution classifier on scikit-learn's digits: any module is sharded and trained alike.

A model's `forward(batch)` returns (summed loss, count); rows are batched by index and bring `targets`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn

HELD_OUT = 5  # every fifth image
SHIFT = 1  # pixels at most, in each direction
NOISE = 0.1  # standard deviation; an image's values are 0 to 1


class Classifier(nn.Module):
    """Two convolutions, a pooling, two linear layers: (batch, 1, 8, 8) -> (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1))
        self.classes = nn.Sequential(nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))

    def scores(self, images: Tensor) -> Tensor:
        """Logits of the ten digits."""
        pooled = nn.functional.max_pool2d(torch.relu(self.features(images)), 2)
        scores: Tensor = self.classes(pooled.flatten(1))
        return scores

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(summed cross-entropy, images counted)."""
        targets = batch["targets"]
        scores = self.scores(batch["images"].to(next(self.parameters()).dtype))
        loss = nn.functional.cross_entropy(scores.float(), targets, ignore_index=-100, reduction="sum")
        return loss, (targets >= 0).sum()


class Digits:
    """Images (count, 8, 8), values 0 to 1, and their digits. Index -1 is a filler that is not counted."""

    def __init__(self, images: NDArray[np.float32], digits: NDArray[np.int64]):
        self._images = images
        self._digits = digits

    def __len__(self) -> int:
        return len(self._digits)

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]:
        """Images (n, 1, 8, 8) float32 and targets (n,) int64, as they are."""
        chosen = np.asarray(indices)
        targets = np.where(chosen < 0, -100, self._digits[chosen])
        return {"images": torch.from_numpy(self._images[chosen][:, None]), "targets": torch.from_numpy(targets)}

    def batch_at(self, indices: NDArray[np.int64], seeds: NDArray[np.uint64]) -> dict[str, Tensor]:
        """The same, each image shifted and with noise, by numbers that its seed gives."""
        batch = self.batch(indices)
        batch["images"] = torch.stack(
            [augmented(image, int(seed)) for image, seed in zip(batch["images"], seeds, strict=True)]
        )
        return batch

    def valid_tokens(self, indices: Sequence[int] | NDArray[np.int64]) -> int:
        """Images that count."""
        return int((np.asarray(indices) >= 0).sum())


def augmented(image: Tensor, seed: int) -> Tensor:
    """`image` (1, 8, 8) moved by up to `SHIFT` pixels each way, with noise."""
    generator = torch.Generator().manual_seed(seed)
    down, right = torch.randint(-SHIFT, SHIFT + 1, (2,), generator=generator).tolist()
    padded = nn.functional.pad(image, (SHIFT,) * 4)
    moved = padded[:, SHIFT + down : SHIFT + down + 8, SHIFT + right : SHIFT + right + 8]
    return moved + NOISE * torch.randn(moved.shape, generator=generator)


def rows() -> tuple[Digits, Digits]:
    """(training rows, held-out rows)."""
    loaded = load_digits()
    images = (loaded.images / 16).astype(np.float32)
    digits = loaded.target.astype(np.int64)
    held_out = np.arange(len(digits)) % HELD_OUT == 0
    return Digits(images[~held_out], digits[~held_out]), Digits(images[held_out], digits[held_out])


def model() -> Classifier:
    """The classifier, with torch's own initial weights."""
    return Classifier()
