"""Rows by both strategies, on spans whose every token is another number."""

import itertools
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from workflow_scripts.lib import shortening
from workflow_scripts.lib.masking import IGNORED, Span
from workflow_scripts.lib.windows import Limits, turns, windows

FIRST = 10_000  # above every number of the small tokenizer, whose marks stand in shortened turns
HEADER = 3


def spans_of(shape):
    """(opening, spans) from [(kind, tokens)]; "answer" is supervised, "assistant" is not."""
    number, spans = FIRST, []
    for turn, (kind, tokens) in enumerate([("opening", shape[0]), *shape[1:]]):
        supervised = kind == "answer"
        tokens += HEADER + 2 if supervised else 0
        spans.append(
            Span(
                kind="assistant" if supervised else kind,
                ids=list(range(number, number + tokens)),
                start=HEADER if supervised else 0,
                stop=tokens - 1 if supervised else 0,
                first_turn=max(0, turn - 1),
                last_turn=max(0, turn - 1),
            )
        )
        number += tokens
    return spans[0], spans[1:]


@pytest.fixture
def limits(prepared):
    def make(context, share=0.25):
        return Limits(context, int(context * share), prepared.coder, Counter(), Counter())

    return make


def supervised_of(spans):
    return [number for span in spans for number in span.ids[span.start : span.stop]]


def check_rows(rows, context):
    for row in rows:
        assert len(row.input_ids) == len(row.labels) <= context
        assert row.labels[0] == IGNORED
        assert any(label != IGNORED for label in row.labels)
        assert all(
            label in (number, IGNORED)
            for number, label in zip(row.input_ids, row.labels, strict=True)
        )
        real = [number for number in row.input_ids if number >= FIRST]
        assert real == sorted(real)


shapes = st.tuples(
    st.sampled_from([8, 8, 20, 400]),
    st.lists(
        st.tuples(
            st.sampled_from(["user", "tool", "answer", "answer", "assistant", "system"]),
            st.one_of(st.integers(1, 60), st.integers(1, 600)),
        ),
        max_size=14,
    ),
)


@settings(max_examples=600, deadline=None)
@given(shape=shapes, context=st.sampled_from([64, 100, 256]), share=st.sampled_from([0.25, 0.5]))
def test_windows_supervise_every_token_once(prepared, shape, context, share):
    limits = Limits(context, int(context * share), prepared.coder, Counter(), Counter())
    opening, spans = spans_of([shape[0], *shape[1]])
    rows = list(windows(opening, spans, limits))
    check_rows(rows, context)
    labels = [label for row in rows for label in row.labels if label != IGNORED]
    assert labels == supervised_of(spans)
    seen: set[int] = set()
    for row in rows:
        assert row.input_ids[0] == opening.ids[0]
        body = {number for number in row.input_ids if number >= FIRST} - set(opening.ids)
        assert len(body & seen) <= limits.repeated
        seen |= body
        start = next(n for n, label in enumerate(row.labels) if label != IGNORED)
        asked = {
            number
            for span in spans
            if span.kind in ("user", "tool") and span.ids[0] < row.labels[start]
            for number in span.ids
        }
        assert not asked or asked & set(row.input_ids[:start])


@settings(max_examples=400, deadline=None)
@given(
    shape=shapes,
    context=st.sampled_from([64, 100, 256]),
    overlong=st.sampled_from(["cut", "drop"]),
)
def test_turns_are_one_row_each(prepared, shape, context, overlong):
    limits = Limits(context, context // 4, prepared.coder, Counter(), Counter())
    opening, spans = spans_of([shape[0], *shape[1]])
    answers = [span for span in spans if span.stop]
    rows = list(turns(opening, spans, limits, overlong))
    check_rows(rows, context)
    labels = [label for row in rows for label in row.labels if label != IGNORED]
    if overlong == "drop":
        assert len(rows) + limits.dropped["overlong-row"] == len(answers)
    else:
        assert [row.last_turn for row in rows] == [answer.last_turn for answer in answers]
        lost = limits.cut["answer-end-supervised-tokens"]
        assert len(labels) + lost == len(supervised_of(answers))
    for row in rows:
        answer = next(span for span in answers if span.last_turn == row.last_turn)
        own = [label for label in row.labels if label != IGNORED]
        assert own == answer.ids[answer.start : answer.start + len(own)]


def test_what_fits_is_one_row_with_everything(limits):
    opening, spans = spans_of([10, ("user", 5), ("answer", 5), ("tool", 5), ("answer", 5)])
    (row,) = windows(opening, spans, limits(64))
    assert row.input_ids == [number for span in [opening, *spans] for number in span.ids]
    assert (row.first_turn, row.last_turn) == (0, 3)


def test_turns_after_the_last_answer_are_left_out_and_counted(limits):
    given = limits(64)
    opening, spans = spans_of([10, ("user", 5), ("answer", 5), ("user", 5), ("assistant", 5)])
    (row,) = windows(opening, spans, given)
    assert row.last_turn == 1
    assert given.dropped == {"turns-after-the-last-supervised": 2}


def test_no_answer_no_row(limits):
    given = limits(64)
    opening, spans = spans_of([10, ("user", 5), ("assistant", 5)])
    assert list(windows(opening, spans, given)) == []
    assert list(turns(opening, [], given, "cut")) == []
    assert given.dropped == {"conversation-without-supervised-turn": 2}


def test_a_window_opens_with_recent_turns(limits):
    shape = [8, *[("user", 4), ("answer", 15)] * 4]
    first, second = windows(*spans_of(shape), limits(100))
    assert (first.first_turn, first.last_turn) == (0, 5)
    assert (second.first_turn, second.last_turn) == (4, 7)
    start = next(n for n, label in enumerate(second.labels) if label != IGNORED)
    assert start == 8 + (4 + 20) + 4 + HEADER


def test_a_long_answer_is_split_and_repeats_its_question_and_its_last_words(limits):
    given = limits(100)
    opening, spans = spans_of([8, ("user", 10), ("answer", 200)])
    rows = list(windows(opening, spans, given))
    assert given.cut["answer-split"] == 1
    question, answer = spans
    for before, row in itertools.pairwise(rows):
        assert row.input_ids[8:18] == question.ids
        assert row.input_ids[18:21] == answer.ids[:HEADER]
        said = row.input_ids[21 : 8 + 25]
        assert said == [number for number in before.input_ids if number in answer.ids][-12:]
        assert (row.first_turn, row.last_turn) == (0, 1)


def test_questions_that_do_not_fit_are_all_counted(limits):
    given = limits(100)
    rows = list(windows(*spans_of([8, *[("user", 40)] * 5, ("answer", 50)]), given))
    assert len(rows) == 1
    assert given.cut["context-turn"] == 5


def test_a_shortened_turn_keeps_what_frames_it_or_is_left_out(prepared):
    shape = [8, ("user", 300), ("answer", 60), ("tool", 300), ("answer", 300)]
    for repeated in range(16, 40):
        given = Limits(128, repeated, prepared.coder, Counter(), Counter())
        opening, spans = spans_of(shape)
        for row in windows(opening, spans, given):
            shown = set(row.input_ids)
            for span in (spans[0], spans[2]):
                assert (span.ids[0] in shown) == (span.ids[-1] in shown)


def test_a_long_system_turn_is_cut_to_a_quarter(limits):
    given = limits(256)
    opening, spans = spans_of([300, ("user", 10), ("answer", 20)])
    (row,) = windows(opening, spans, given)
    assert row.input_ids[64:74] == spans[0].ids
    assert row.input_ids[:16] == opening.ids[:16]
    assert row.input_ids[48:64] == opening.ids[-16:]
    assert given.cut == {"system-turn": 1}


def test_a_cut_row_does_not_open_on_a_result(limits):
    shape = [8, ("user", 60), ("answer", 20), ("tool", 20), ("answer", 20), ("tool", 5)]
    given = limits(100)
    *_, row = turns(*spans_of([*shape, ("answer", 30)]), given, "cut")
    assert row.first_turn == 3
    assert given.cut["row"] == 2


def test_a_context_that_is_all_header_is_refused(limits):
    opening = Span("opening", list(range(8)), 0, 0, 0, 0)
    answer = Span("assistant", list(range(100)), 40, 99, 0, 0)
    for rows in (
        windows(opening, [answer], limits(32)),
        turns(opening, [answer], limits(32), "cut"),
    ):
        with pytest.raises(ValueError, match="context: 32 tokens leave no room"):
            list(rows)


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=30), budget=st.integers(16, 60)
)
def test_a_long_result_is_cut_in_the_middle_and_marked(prepared, text, budget):
    plain, cut = prepared.coder.plain, Counter()
    tokens = len(plain.encode(text).ids)
    turn = {"role": "tool", "text": text}
    (found,) = shortening.shorten_results([turn], prepared.coder, budget, cut)
    if tokens <= budget:
        assert found is turn
        assert not cut
        return
    head, tail = found["text"].split(shortening.MARK.format(cut["tool-result-tokens"]))
    assert text.startswith(head)
    assert text.endswith(tail)
    assert cut["tool-result"] == 1
    assume(budget >= 40)
    assert len(plain.encode(found["text"]).ids) <= budget + 2


def test_a_huge_result_is_encoded_in_parts(prepared, monkeypatch):
    monkeypatch.setattr(shortening, "CHARACTERS_AT_A_TIME", 100)
    text = "".join(f"line {number}\n" for number in range(100))
    cut = Counter()
    turn = {"role": "tool", "text": text}
    (found,) = shortening.shorten_results([turn], prepared.coder, 60, cut)
    assert found["text"].startswith("line 0\n")
    assert found["text"].endswith("line 99\n")
    assert shortening.shorten_results([turn], prepared.coder, None, cut) == [turn]
