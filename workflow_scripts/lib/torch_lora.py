"""LoRA training with PyTorch: TRL's SFTTrainer and PEFT, on rows that leave it nothing to prepare.

The loss lies in `torch_loss`, the optimizer steps in `torch_trainer`.
"""

import os
import warnings

from workflow_scripts.lib import initial_adapter, matmul_peak, measure, precision, recipe, training
from workflow_scripts.lib.torch_loss import evaluate
from workflow_scripts.lib.torch_trainer import train
from workflow_scripts.lib.training import Engine

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy")


def load(settings: dict, config: dict) -> Engine:
    """Load the model in its folder with fresh adapters, ready to be trained on one device."""
    if settings["bits"] is not None:
        raise ValueError("backends.*.bits: PyTorch trains on 16 or 32 bit weights here; remove it")
    # With several visible, the Trainer would spread one run over them.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # Names that TRL still uses and transformers is about to change.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\b")
    device, dtype = precision.resolve_torch(
        settings["device"], settings["dtype"], **probe(settings["device"])
    )
    memory = measure.TorchMemory(device)
    peak_flops = matmul_peak.torch_peak_flops(device, dtype)
    memory.restart()
    placed = {} if device == "cpu" else {"device_map": {"": device}}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["model_folder"],
        dtype=getattr(torch, dtype),
        attn_implementation="sdpa",
        local_files_only=True,
        **placed,
    )
    load_peak = memory.sample().peak
    memory.restart()
    total = sum(parameter.numel() for parameter in model.parameters())
    lora = settings["lora"]
    start = initial_adapter.read(settings["initial_adapter"], config, lora["r"])
    model = add_adapters(model, config, lora["r"], lora["alpha"], start)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Engine(
        device=device,
        dtype=dtype,
        loader="transformers",
        packages=PACKAGES,
        trainable_parameters=trainable,
        total_parameters=total + trainable,
        matmul_peak_flops=peak_flops,
        load_peak_bytes=load_peak,
        evaluate=lambda rows: evaluate(model, device, rows),
        train=lambda plan, recorder, start: train(
            model, settings, device, dtype, memory, plan, recorder, start
        ),
        save=lambda folder: model.save_pretrained(str(folder), save_embedding_layers=False),
        memory=memory.sample,
    )


def probe(device: str) -> dict[str, bool]:
    """Find out what `precision.resolve_torch` asks: devices here, and whether bfloat16 works there.

    Older Macs and cards accept the type and fail in a product, so that one is really computed.
    """
    import torch

    here = {"mps": torch.backends.mps.is_available(), "cuda": torch.cuda.is_available()}
    name = next((n for n, found in here.items() if found and device in ("auto", n)), None)
    if name is None:
        return here
    try:
        ones = torch.ones(64, 64, dtype=torch.bfloat16, device=name)
        works = bool(((ones @ ones).float() == 64).all())
    except (RuntimeError, TypeError):
        works = False
    if name == "cuda":
        works = works and torch.cuda.is_bf16_supported(including_emulation=False)
    return {**here, "bfloat16": works}


def add_adapters(model, config: dict, rank: int, alpha: float, start: dict):
    """Return a PEFT model: float32 adapters on all seven linears of all layers, A as in `start`
    (module name -> (rank, inputs), see `initial_adapter`), B zero.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        model,
        LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=0.0,
            bias="none",
            target_modules=list(recipe.LORA_LINEARS),
            task_type="CAUSAL_LM",
        ),
    )
    found = {
        name: (module.lora_A["default"].weight, module.lora_B["default"].weight)
        for name, module in adapters(model).items()
    }
    trainable = [p for p in model.parameters() if p.requires_grad]
    sizes = {name: (a.shape[1], b.shape[0]) for name, (a, b) in found.items()}
    recipe.check_adapters(sizes, config, rank, sum(p.numel() for p in trainable))
    with torch.no_grad():
        for name, (a, b) in found.items():
            a.copy_(torch.from_numpy(start[name]))
            b.zero_()
    if any(p.dtype != torch.float32 for p in trainable):
        raise ValueError("adapters must be float32 over frozen weights of any type")
    return model


def adapters(model) -> dict:
    """Return {module name as in `recipe.lora_shapes`: PEFT's LoRA layer}."""
    from peft.tuners.lora import LoraLayer

    modules = model.get_base_model().named_modules()
    return {name: module for name, module in modules if isinstance(module, LoraLayer)}


if __name__ == "__main__":
    training.main(load)
