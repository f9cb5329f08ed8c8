"""PyTorch Lightning: a strategy that is Lightning's DDP, with gradients averaged by daemons. Copy the class.

gcrun -- torchrun --nproc-per-node=2 examples/lightning_digits.py
"""

import argparse
import os
from typing import Any

import digits
import pytorch_lightning as pl  # of the package `lightning`: import lightning.pytorch as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gcclient


class Gradcomm(DDPStrategy):
    """compression: a codec spec, the daemon's ``codec.default`` without. ddp: what DDPStrategy takes."""

    def __init__(self, compression: str | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        self.compression = compression

    def configure_ddp(self) -> None:
        super().configure_ddp()
        gcclient.init()
        gcclient.attach(self.model, compression=self.compression)

    def teardown(self) -> None:
        gcclient.shutdown()
        super().teardown()


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(digits.SIZE**2, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        pictures, labels = batch
        loss = cross_entropy(self.net(pictures), labels)
        if self.trainer.is_global_zero and number % 10 == 0:
            print(f"step {number + 1}: loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=101)
parser.add_argument("--codec", default="topk(ratio=0.02)", help="any of docs/codecs.md")
args = parser.parse_args()

pl.seed_everything(0, verbose=False)
local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of torchrun, with the next
trainer = pl.Trainer(
    strategy=Gradcomm(args.codec),
    accelerator="cpu",
    devices=local,
    num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // local,
    max_steps=args.steps,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Digits()
data = TensorDataset(*digits.batch(32 * args.steps * trainer.world_size, torch.Generator().manual_seed(0)))
trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))
