"""The README.md of an adapter: what it was trained on, how well it did, and how to load it."""

from pathlib import Path

LOAD = {
    "torch": """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{model}")
model = PeftModel.from_pretrained(model, "{adapter}")
tokenizer = AutoTokenizer.from_pretrained("{model}")
```""",
    "mlx": """```sh
python -m mlx_lm generate --model {model} --adapter-path {adapter} --prompt "..."
```""",
}
LIBRARY = {"torch": "peft", "mlx": "mlx"}


def adapter_card(row: dict, model_folder: str | Path, adapter_folder: str | Path) -> str:
    """Return the card of the run that `row` describes, as Markdown with the hub's front matter."""
    load = LOAD[row["engine"]].format(model=model_folder, adapter=adapter_folder)
    weights = f"{row['bits']}-bit" if row["bits"] else row["dtype"]
    loss, accuracy = (
        f"{_figure(row[f'{name}_before'])} | {_figure(row[name])}"
        for name in ("val_loss", "val_token_accuracy")
    )
    return f"""---
library_name: {LIBRARY[row["engine"]]}
tags: [lora]
---
# LoRA adapter: {row["backend"]}, {row["model"]}, {row["context"]} tokens, {row["variant"]}

Study {row["study"]}, status {row["status"]}, {row["optimizer_steps"]} optimizer steps of
{row["effective_batch"]} rows at recipe `{row["recipe"]}`, seed {row["seed"]}.

|   | before | after |
| - | -----: | ----: |
| validation loss | {loss} |
| token accuracy | {accuracy} |

It stands on these frozen weights and no others ({weights}): `{model_folder}`, SHA-256
`{row["model_sha256"]}`. Examples: SHA-256 `{row["examples_sha256"]}`.

From the folder of the workflow:

{load}
"""


def _figure(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4f}"
