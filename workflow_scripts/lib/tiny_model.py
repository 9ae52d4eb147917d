"""A model made here: seeded weights in Qwen 2's architecture, a tokenizer trained on given texts.

Nothing is fetched and torch is not needed; the folder is an ordinary Hugging Face one, its bytes
are the same for the same arguments, and tensors are written one by one, so 3B shapes work too.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from workflow_scripts.lib import jsonl

TEMPLATE = Path(__file__).with_name("qwen_chat_template.jinja")
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ADDED_TOKENS = {PAD: True, START: True, END: True, "<tool_call>": False, "</tool_call>": False}
WORDS = (  # Qwen 2's own way of cutting text before byte pairs are merged
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
NUMBERS_AT_A_TIME = 1 << 24  # so that a large embedding never lies in memory as float32


def train_tokenizer(texts: Iterable[str], vocabulary: int):
    """Return a `tokenizers.Tokenizer`: byte-level BPE as Qwen 2's, added tokens at the end.

    It has at most `vocabulary` entries, added tokens included; fewer when the texts give no more
    merges. Raises ValueError for a vocabulary that can't hold all bytes and the added tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    smallest = 256 + len(ADDED_TOKENS)
    if vocabulary < smallest:
        raise ValueError(f"vocabulary: {vocabulary} is below {smallest} (256 bytes, added tokens)")
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocabulary - len(ADDED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(
        [
            AddedToken(text, special=special, normalized=False)
            for text, special in ADDED_TOKENS.items()
        ]
    )
    return tokenizer


def write_tokenizer(folder: Path, tokenizer, max_position_embeddings: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": special,
        }
        for text, special in ADDED_TOKENS.items()
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [START, END],
        "bos_token": None,
        "chat_template": TEMPLATE.read_text("utf-8"),
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "errors": "replace",
        "model_max_length": max_position_embeddings,
        "pad_token": PAD,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    jsonl.write_json(folder / "tokenizer_config.json", config)


def write_weights(
    folder: Path,
    end_id: int,
    pad_id: int,
    *,
    vocab_size: int,
    hidden_size: int = 128,
    intermediate_size: int = 384,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    max_position_embeddings: int = 32768,
    rope_theta: float = 1e6,
    rms_norm_eps: float = 1e-6,
    tie_word_embeddings: bool = True,
    dtype: str = "float32",
    seed: int = 0,
    embedding_std: float = 0.1,
) -> None:
    """Write config.json, generation_config.json and model.safetensors of a Qwen 2 model.

    `vocab_size` is the number of embedding rows. Linear weights have a standard deviation of
    1/sqrt(fan in), times 1/sqrt(2 layers) where they write to the residual stream.
    `embedding_std`: with tied embeddings no logit exceeds hidden_size * embedding_std, since the
    last norm gives a vector of length sqrt(hidden_size); 0.02 would keep a small frozen base from
    ever being sure of a token. Raises ValueError for shapes that don't divide.
    """
    if hidden_size % (2 * num_attention_heads):
        raise ValueError(
            f"hidden_size: {hidden_size} must be a multiple of twice the heads "
            f"({num_attention_heads})"
        )
    if num_attention_heads % num_key_value_heads:
        raise ValueError(
            f"heads: {num_attention_heads} must be a multiple of kv_heads ({num_key_value_heads})"
        )
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r}; expected one of {', '.join(DTYPES)}")
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": pad_id,
        "dtype": dtype,
        "eos_token_id": end_id,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_position_embeddings,
        "max_window_layers": num_hidden_layers,
        "model_type": "qwen2",
        "num_attention_heads": num_attention_heads,
        "num_hidden_layers": num_hidden_layers,
        "num_key_value_heads": num_key_value_heads,
        "pad_token_id": pad_id,
        "rms_norm_eps": rms_norm_eps,
        "rope_theta": rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": tie_word_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }
    jsonl.write_json(folder / "config.json", config)
    generation = {"bos_token_id": pad_id, "eos_token_id": [end_id, pad_id], "pad_token_id": pad_id}
    jsonl.write_json(folder / "generation_config.json", {**generation, "do_sample": False})
    tensors = list(_tensors(config, embedding_std))
    write_safetensors(folder / "model.safetensors", tensors, dtype, seed)


def _tensors(config: dict, embedding_std: float) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield name, shape and standard deviation of each tensor; a norm, all ones, has none."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    key_value = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    into_residual = (2 * config["num_hidden_layers"]) ** -0.5
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden), embedding_std
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,), 0.0
        for name, out in (("q", hidden), ("k", key_value), ("v", key_value)):
            yield f"{at}.self_attn.{name}_proj.weight", (out, hidden), hidden**-0.5
            yield f"{at}.self_attn.{name}_proj.bias", (out,), 0.02
        yield f"{at}.self_attn.o_proj.weight", (hidden, hidden), hidden**-0.5 * into_residual
        yield f"{at}.post_attention_layernorm.weight", (hidden,), 0.0
        yield f"{at}.mlp.gate_proj.weight", (inner, hidden), hidden**-0.5
        yield f"{at}.mlp.up_proj.weight", (inner, hidden), hidden**-0.5
        yield f"{at}.mlp.down_proj.weight", (hidden, inner), inner**-0.5 * into_residual
    yield "model.norm.weight", (hidden,), 0.0
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden), embedding_std


def write_safetensors(path: Path, tensors: list[tuple], dtype: str, seed: int) -> None:
    """Draw and write each (name, shape, standard deviation) in turn, in the safetensors format.

    Each tensor has its own stream of numbers, from the seed and its name. Written by hand, since
    the library wants all tensors in memory, and numpy has no bfloat16.
    """
    header: dict = {"__metadata__": {"format": "pt"}}
    width = 4 if dtype == "float32" else 2
    offset = 0
    for name, shape, _ in tensors:
        bytes_here = width * shape[0] * (shape[1] if len(shape) == 2 else 1)
        offsets = [offset, offset + bytes_here]
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": offsets}
        offset += bytes_here
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape, std in tensors:
            for numbers in _numbers(name, shape, std, seed):
                file.write(_as_bytes(numbers, dtype))


def _numbers(name: str, shape: tuple[int, ...], std: float, seed: int) -> Iterator:
    import numpy as np

    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    left = int(np.prod(shape))
    while left:
        count = min(left, NUMBERS_AT_A_TIME)
        left -= count
        if std:
            yield generator.standard_normal(count, dtype=np.float32) * np.float32(std)
        else:
            yield np.ones(count, dtype=np.float32)


def _as_bytes(numbers, dtype: str) -> bytes:
    """Little-endian bytes; bfloat16 is the upper half of a float32, rounded to even."""
    import numpy as np

    if dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        numbers = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    elif dtype == "float16":
        numbers = numbers.astype(np.float16)
    return numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).tobytes()
