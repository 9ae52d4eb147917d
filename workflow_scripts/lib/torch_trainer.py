"""TRL's SFTTrainer on rows that leave it nothing to prepare, each optimizer step under our eyes."""

import math
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from workflow_scripts.lib import measure, precision, recipe
from workflow_scripts.lib.batches import IGNORED, Batch, Plan
from workflow_scripts.lib.checkpoints import Tensors
from workflow_scripts.lib.recorder import Recorder
from workflow_scripts.lib.torch_loss import batch_loss, to_device


def sft_arguments(device: str, settings: dict, output_dir: str) -> dict:
    """Return the arguments of SFTConfig, each default that would change the problem said away.

    Memory is pinned for CUDA alone; no worker processes anywhere, as making a batch takes far less
    time than starting one, and on a Mac they cost memory. Clipping, the finiteness check and loss
    scaling are ours, in one place before the update, hence max_grad_norm 0 here.
    """
    return {
        "output_dir": output_dir,
        "use_cpu": device == "cpu",
        "bf16": False,  # no autocast: weights have their type, adapters are float32
        "fp16": False,
        "max_steps": settings["optimizer_steps"],
        "per_device_train_batch_size": settings["micro_batch"],
        "gradient_accumulation_steps": recipe.accumulation(
            settings["effective_batch"], settings["micro_batch"]
        ),
        "gradient_checkpointing": settings["gradient_checkpointing"],
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "max_grad_norm": 0.0,
        "dataloader_pin_memory": device == "cuda",
        "dataloader_num_workers": 0,
        "dataloader_drop_last": False,
        "train_sampling_strategy": "sequential",
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "remove_unused_columns": False,
        "max_length": None,
        "packing": False,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "push_to_hub": False,
        "disable_tqdm": True,
        "seed": settings["seed"],
    }


def trainer_class():
    """Return our subclass of SFTTrainer; a function, so that importing this module is cheap."""
    from trl import SFTTrainer

    class LoraTrainer(SFTTrainer):
        """SFTTrainer whose loss is `batch_loss` over the step's supervised tokens."""

        loss_is_scaled_for_ga = True
        scale = None  # precision.LossScale
        clock = None  # measure.StepClock
        raise_if_stopped = staticmethod(lambda: None)
        before_first_step = staticmethod(lambda: None)
        sums = ()  # loss and correct tokens of the step so far, on the device

        def get_batch_samples(self, *args, **kwargs):
            self.clock.start()
            samples = super().get_batch_samples(*args, **kwargs)
            if self.state.global_step == 0:
                self.before_first_step()
            return samples

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.raise_if_stopped()
            if num_items_in_batch is None:
                raise RuntimeError("num_items_in_batch is missing: means would be per micro-batch")
            loss, correct = batch_loss(
                model,
                inputs["input_ids"],
                inputs["positions"],
                inputs["targets"],
                inputs["weights"],
                inputs["chunks"],
            )
            self.sums = (*self.sums, (loss.detach(), correct))
            return loss * (self.scale.value / num_items_in_batch)

        def floating_point_ops(self, inputs):
            return 0  # the stock count walks over all parameters at every micro-batch

    return LoraTrainer


def train(
    model,
    settings: dict,
    device: str,
    dtype: str,
    memory: measure.TorchMemory,
    plan: Plan,
    recorder: Recorder,
    start: Tensors | None = None,
) -> None:
    """Carry out the plan through SFTTrainer, each optimizer step into `recorder`.

    `start` is the checkpoint to go on from; the recorder then has the steps made before, and the
    plan those that are left. Needs none of the Trainer's own checkpoints: its position is that of
    the plan, and the learning rate a function of the step's number.
    """
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import SFTConfig

    update = recipe.optimizer("torch", settings["recipe"])
    peak, steps = settings["learning_rate"], settings["optimizer_steps"]
    done_before = len(recorder.steps)

    def rate(step: int) -> float:
        return recipe.learning_rate(
            step,
            peak=peak,
            steps=steps,
            warmup_steps=settings["warmup_steps"],
            schedule=update.schedule,
        )

    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    parameters = list(named.values())
    adamw = torch.optim.AdamW(
        parameters,
        lr=peak,
        betas=tuple(settings["betas"]),
        eps=settings["epsilon"],
        weight_decay=settings["weight_decay"],
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        adamw, lambda done: rate(min(done_before + done + 1, steps)) / peak
    )
    if start:
        restore(named, adamw, start)
    if not len(plan.order):
        return
    waiting: deque[Batch] = deque()  # made by the collator, not yet part of a finished step

    def collate(rows: list[dict]) -> dict:
        batch = plan.batch([row["row"] for row in rows])
        waiting.append(batch)
        ids, positions, targets, weights, chunks = to_device(batch, "cpu")
        # The Trainer counts num_items_in_batch over these.
        labels = targets.masked_fill(weights == 0, IGNORED)
        return {
            "input_ids": ids,
            "positions": positions,
            "targets": targets,
            "weights": weights,
            "chunks": chunks,
            "labels": labels,
            "shift_labels": labels,
        }

    class Steps(TrainerCallback):
        """What happens around an update: unscale, check, clip; then the clock and the record."""

        def on_pre_optimizer_step(self, args, state, control, **_):
            memory.sample()
            self.micro_batches = [waiting.popleft() for _ in trainer.sums]
            tokens = sum(batch.supervised for batch in self.micro_batches)
            gradients = [parameter.grad for parameter in parameters]
            if trainer.scale.value != 1.0:
                for gradient in gradients:
                    gradient.div_(trainer.scale.value)
            norm = torch.nn.utils.get_total_norm(gradients)
            loss = torch.stack([part for part, _ in trainer.sums]).sum()
            correct = torch.stack([part for _, part in trainer.sums]).sum()
            loss, self.correct, self.norm = torch.stack([loss, correct, norm.float()]).tolist()
            trainer.sums = ()
            self.loss = loss / tokens
            if math.isfinite(self.loss) and trainer.scale.skips(math.isfinite(self.norm)):
                for parameter in parameters:
                    parameter.grad = None  # AdamW passes over these: nothing is updated
                self.norm = None
                return
            recorder.check(self.loss, self.norm)
            if update.clip and settings["max_grad_norm"]:
                torch.nn.utils.clip_grads_with_norm_(parameters, settings["max_grad_norm"], norm)

        def on_step_end(self, args, state, control, **_):
            seconds = trainer.clock.stop()
            recorder.record(
                self.loss,
                self.correct,
                rate(done_before + state.global_step),
                self.norm,
                seconds,
                self.micro_batches,
                memory.sample().used,
            )

    rows = plan.order.reshape(-1).tolist()
    left = {**settings, "optimizer_steps": len(plan.order)}
    trainer = trainer_class()(
        model=model,
        args=SFTConfig(**sft_arguments(device, left, settings["state_folder"])),
        train_dataset=Dataset(
            InMemoryTable.from_pydict({"row": rows}), fingerprint=f"rows-{len(rows)}"
        ),
        data_collator=collate,
        processing_class=AutoTokenizer.from_pretrained(settings["model_folder"]),
        optimizers=(adamw, schedule),
        callbacks=[Steps()],
    )
    trainer.scale = precision.LossScale.for_dtype(dtype)
    trainer.raise_if_stopped = recorder.raise_if_stopped
    trainer.remove_callback(PrinterCallback)
    recorder.snapshot = lambda: {
        "adapter": to_host(named),
        "optimizer": optimizer_state(adamw, named),
        "loss_scale": trainer.scale.as_arrays(),
        "random": to_host(random_state(device)),
    }
    if start:
        trainer.scale.restore(start["loss_scale"])
        # After the data loader has drawn its seed, so that the stream goes on as it would have.
        trainer.before_first_step = lambda: set_random_state(start["random"])
    trainer.clock = measure.StepClock(synchronizer(device))
    trainer.train()


def to_host(tensors: dict) -> dict[str, np.ndarray]:
    """Copy tensors into arrays of their own."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()}


def optimizer_state(optimizer, named: dict) -> dict[str, np.ndarray]:
    """Return what an optimizer keeps of each parameter, as "<parameter>|<key>" -> array."""
    return to_host(
        {
            f"{name}|{key}": value
            for name, parameter in named.items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
    )


def restore(named: dict, optimizer, start: Tensors) -> None:
    """Put parameters and optimizer state of a checkpoint where `optimizer_state` read them."""
    import torch

    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(torch.from_numpy(start["adapter"][name]))
    for place, array in start["optimizer"].items():
        name, _, key = place.rpartition("|")
        value = torch.from_numpy(array)
        # The count of steps stays on the host, where AdamW keeps it.
        optimizer.state[named[name]][key] = value if key == "step" else value.to(named[name].device)


def random_state(device: str) -> dict:
    """Return the states of torch's generators: the host's and the device's."""
    import torch

    states = {"cpu": torch.get_rng_state()}
    if device == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    if device == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_random_state(states: Mapping[str, np.ndarray]) -> None:
    """Set the generators to what `random_state` returned."""
    import torch

    setters = {
        "cpu": torch.set_rng_state,
        "cuda": torch.cuda.set_rng_state,
        "mps": torch.mps.set_rng_state,
    }
    for name, state in states.items():
        setters[name](torch.from_numpy(state))


def synchronizer(device: str) -> Callable[[], None]:
    """Return the function that waits until the device has done all it was given."""
    import torch

    return {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device, lambda: None)
