"""The row of a run: every field in one fixed order, null where it does not apply.

Units: bytes are bytes, times are seconds, rates are per second, accuracies are shares from 0 to 1.
"""

IDENTITY = (
    "study backend engine device dtype bits group_size model revision tokenizer context variant "
    "recipe loop seed learning_rate micro_batch effective_batch gradient_checkpointing loader"
)
ENDING = "status reason log_end last_step resumed"
TIMES = (
    "optimizer_steps skipped_steps distinct_shapes compile_seconds train_seconds "
    "evaluation_seconds wall_seconds started_at"
)
RATES = (
    "optimizer_steps_per_s micro_batches_per_s sequences_per_s tokens_per_s "
    "supervised_tokens_per_s padded_tokens_per_s step_seconds_p50 step_seconds_p95 "
    "flops_per_token matmul_peak_flops utilization"
)
TOKENS = "trained_tokens trained_supervised_tokens"
MEMORY = (
    "load_peak_bytes peak_device_bytes peak_reserved_bytes peak_process_bytes swap_growth_bytes "
    "predicted_peak_bytes"
)
LEARNING = (
    "val_loss_before val_loss val_token_accuracy_before val_token_accuracy val_rows val_tokens"
)
EVIDENCE = (
    "trainable_parameters total_parameters examples_sha256 model_sha256 initial_adapter_sha256 "
    "chip os versions"
)
ROW_FIELDS = tuple(
    " ".join([IDENTITY, ENDING, TIMES, RATES, TOKENS, MEMORY, LEARNING, EVIDENCE]).split()
)
NUMBERS = frozenset(
    " ".join([TIMES, RATES, TOKENS, MEMORY, LEARNING]).replace("started_at", "").split()
)
STATUSES = (
    "ok",
    "oom",
    "swap",
    "timeout",
    "diverged",
    "crashed",
    "over_budget",
    "unavailable",
)


def make_row(*parts: dict) -> dict:
    """Merge what different sides know of a run into one row; later parts win.

    Keys that are no field of a row are left out (settings hold some), absent fields become null.
    Raises ValueError when the status is none of STATUSES.
    """
    known = {key: value for part in parts for key, value in part.items()}
    row = {field: known.get(field) for field in ROW_FIELDS}
    if row["status"] not in STATUSES:
        raise ValueError(f"status {row['status']!r} is none of {', '.join(STATUSES)}")
    return row


def checked_row(row: object, path: object) -> dict:
    """Return a row that was read from a file if it is one; raises ValueError naming the file."""
    if not isinstance(row, dict):
        problem = f"holds {type(row).__name__}"
    elif missing := [field for field in ROW_FIELDS if field not in row]:
        problem = f"lacks {len(missing)} fields, such as {', '.join(missing[:3])}"
    elif row["status"] not in STATUSES:
        problem = f"has status {row['status']!r}, none of {', '.join(STATUSES)}"
    elif wrong := [field for field in row.keys() & NUMBERS if not _is_number(row[field])]:
        problem = f"has no number in {', '.join(sorted(wrong)[:3])}"
    else:
        return row
    raise ValueError(f"{path}: not the row of a run: it {problem}; delete it and run again")


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
