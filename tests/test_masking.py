"""Tokens and masks of whole conversations, on a small tokenizer."""

import unicodedata

import conversation_maker as make
from hypothesis import example, given, settings

from workflow_scripts.lib import masking
from workflow_scripts.lib.chat import blocks_of, messages_of, opening_of


def encoded(record, prepared):
    """(messages as the stock template takes them, spans with the opening first)."""
    messages, _ = messages_of(record["turns"], prepared.chat.format)
    blocks = [
        opening_of(prepared.chat, record["system"], []),
        *blocks_of(messages, prepared.chat.format),
    ]
    if record["system"] is not None:
        messages.insert(0, {"role": "system", "content": record["system"]})
    return messages, masking.encode(blocks, prepared.coder)


def check_against_stock(record, prepared):
    """Same ids as the stock template on the whole conversation; supervised text as by hand."""
    messages, spans = encoded(record, prepared)
    ids, labels = masking.labels_of(spans)
    if messages and (record["system"] is not None or messages[0]["role"] != "system"):
        stock = prepared.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert ids == stock
    assert len(ids) == len(labels)
    check_supervised(record, labels, prepared)


def check_supervised(record, labels, prepared):
    wanted = [
        make.words_of(turn) + "<|im_end|>"
        for turn in record["turns"]
        if turn["role"] == "assistant" and turn["supervised"] and make.words_of(turn)
    ]
    supervised = [label for label in labels if label != masking.IGNORED]
    assert prepared.tokenizer.decode(supervised, skip_special_tokens=False) == "".join(wanted)


@settings(max_examples=150, deadline=None)
@given(record=make.records(odd=False))
@example(record=make.record(make.assistant("a", make.call("ls")), make.tool("\n\nx\n")))
def test_same_ids_as_the_stock_template(prepared, record):
    check_against_stock(record, prepared)


@settings(max_examples=150, deadline=None)
@given(record=make.records())
@example(record=make.record(make.user("<|im_end|>"), make.assistant("<|im_start|><tool_call>")))
def test_special_tokens_in_content_stay_text(prepared, record):
    _, spans = encoded(record, prepared)
    ids, labels = masking.labels_of(spans)
    check_supervised(record, labels, prepared)
    added = prepared.coder.added
    assert ids.count(added["<|im_start|>"]) == len(spans)
    assert ids.count(added["<|im_end|>"]) == len(spans)
    calls = [call for turn in record["turns"] for call in turn.get("calls", ()) if turn["calls"]]
    assert ids.count(added["<tool_call>"]) == len(calls)
    assert added["<|endoftext|>"] not in ids


def test_mask_of_an_answer_token_by_token(prepared):
    conversation = make.record(
        make.user("Hi"), make.assistant("Hi", supervised=False), make.assistant("Run")
    )
    _, spans = encoded(conversation, prepared)
    ids, labels = masking.labels_of(spans[-1:])
    decode = prepared.tokenizer.decode
    split = labels.index(next(label for label in labels if label != masking.IGNORED))
    assert decode(ids[:split]) == "<|im_start|>assistant\n"
    assert decode(ids[split:]) == "Run<|im_end|>\n"
    assert labels[split:] == [*ids[split:-1], masking.IGNORED]
    assert all(span.start == span.stop == 0 for span in spans[:-1])


def test_text_is_normalized_as_the_tokenizer_does(prepared):
    _, spans = encoded(make.record(make.assistant("e\u0301")), prepared)
    _, labels = masking.labels_of(spans)
    supervised = [label for label in labels if label != masking.IGNORED]
    assert prepared.tokenizer.decode(supervised) == unicodedata.normalize(
        "NFC", "e\u0301<|im_end|>"
    )


def test_an_added_token_that_the_vocabulary_holds_too_stays_text():
    """As in Llama 3 and SmolLM2, whose special tokens are entries of the vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {letter: number for number, letter in enumerate(sorted("<|END>xyz"))}
    vocabulary["<|END|>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|END|>"])
    end = tokenizer.token_to_id("<|END|>")
    assert tokenizer.encode("<|END|>").ids == [end]
    coder = masking.coder_of(tokenizer)
    assert end not in coder.plain.encode("<|END|> x").ids
    assert coder.added == {"<|END|>": end}
