"""Hugging Face Trainer: a callback that has the gradients of its model averaged by daemons. Copy the class.

The model is a GPT-2 of random weights, a token a byte of source code; nothing is downloaded.

gcrun -- torchrun --nproc-per-node=2 examples/hf_trainer.py
"""

import argparse
import tempfile
from typing import Any

import text
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import gcclient


class Gradcomm(TrainerCallback):
    """compression: a codec spec, the daemon's ``codec.default`` without. Add it to a Trainer before ``train()``."""

    def __init__(self, trainer: Trainer, compression: str | None = None) -> None:
        self.trainer, self.compression = trainer, compression

    def on_train_begin(self, *training: Any, **more: Any) -> None:
        gcclient.init()
        gcclient.attach(self.trainer.model_wrapped, compression=self.compression)  # which is under DDP by now

    def on_train_end(self, *training: Any, **more: Any) -> None:
        gcclient.shutdown()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=101)
parser.add_argument("--passes", type=int, default=1, help="backward passes a step")
parser.add_argument("--codec", default="fp16", help="any of docs/codecs.md")
args = parser.parse_args()

torch.manual_seed(0)
shape = GPT2Config(vocab_size=text.VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=2)
shape.bos_token_id = shape.eos_token_id = None
model = GPT2LMHeadModel(shape)
rows = text.load().train.long()[: 64 * 4096].view(-1, 64)
data = [{"input_ids": row, "labels": row} for row in rows]
training = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=args.steps,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=args.passes,
    learning_rate=1e-3,
    use_cpu=True,
    ddp_backend="gloo",
    logging_steps=10,
    logging_first_step=True,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=training, train_dataset=data)
trainer.add_callback(Gradcomm(trainer, args.codec))
trainer.train()
if trainer.is_world_process_zero():
    for said in trainer.state.log_history:
        if "loss" in said:
            print(f"step {said['step']}: loss {said['loss']}", flush=True)
