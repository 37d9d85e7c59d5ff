"""Text: streams that never split a character, fingerprints, chat templates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.base import EngineError, IncompatibleModelsError
from outrider.engines.tokenizer import (
    ByteTokenizer,
    HFTokenizer,
    TableTokenizer,
    Tokenizer,
    check_same_vocabulary,
    fingerprint,
)
from words import trained

CASE_18 = "héllo 😀👩‍👩‍👧 歪 — end"
TEXTS = [
    CASE_18,
    " leading and trailing ",
    "tabs\tand\nlines\r\n",
    "    four spaces",
    "日本語のテキスト",
    "def f(x):\n    return x ** 2",
    "e\u0301 combined, \u200d joiner",
    "",
]


def streamed(tokenizer: TableTokenizer, ids: Iterable[int]) -> list[str]:
    stream = tokenizer.text_stream()
    return [*(stream.push(token) for token in ids), stream.flush()]


# --- bytes -------------------------------------------------------------------------------


def test_case_18_bytes_in_blocks_of_any_size() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(CASE_18)
    assert len(ids) == 41
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == CASE_18 == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    for size in range(1, 8):
        stream = tokenizer.text_stream()
        blocks = [ids[i : i + size] for i in range(0, len(ids), size)]
        deltas = ["".join(map(stream.push, block)) for block in blocks]
        assert "".join(deltas) == CASE_18
        assert not any("\ufffd" in delta for delta in deltas)
        assert stream.flush() == ""


def test_case_18_an_emoji_in_two_halves() -> None:
    data = "😀".encode()
    tokenizer = ByteTokenizer({300: data[:2], 301: data[2:]})
    assert streamed(tokenizer, [300, 301]) == ["", "😀", ""]


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    tokenizer = ByteTokenizer()
    ids = list("a😀".encode())[:-1]
    pieces = streamed(tokenizer, ids)
    assert pieces[:-1] == ["a", "", "", ""]
    assert "".join(pieces) == tokenizer.decode(ids) == "a\ufffd"


@given(st.lists(st.integers(0, 256)))
def test_joined_pieces_are_the_decode_of_all(ids: list[int]) -> None:
    """Whatever a model may emit, broken UTF-8 included."""
    tokenizer = ByteTokenizer()
    plain = bytes(i for i in ids if i < 256).decode("utf-8", "replace")
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == plain


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    data = text.encode("utf-8", "replace").decode()
    assert ByteTokenizer().decode(ByteTokenizer().encode(data)) == data


def test_control_and_unknown_ids_write_nothing() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([104, 256, 105, 9999, -1]) == "hi"
    assert tokenizer.token_bytes(256) == b"<end>"
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(999) == b""
    assert tokenizer.eos_token_ids == tokenizer.special_ids == {256}
    assert tokenizer.vocab_size == 257


def test_a_table_of_ones_own() -> None:
    tokenizer = ByteTokenizer({257: b"Hi", 258: b"\nUs", 259: b"er", 260: b" more"})
    assert tokenizer.encode("Hi\nUser: more") == [257, 258, 259, ord(":"), 260]
    assert tokenizer.decode([257, 258, 259]) == "Hi\nUser"
    assert tokenizer.vocab_size == 261
    with pytest.raises(ValueError, match="256"):
        ByteTokenizer({256: b"x"})
    with pytest.raises(EngineError, match="byte 10"):
        ByteTokenizer({10: b"eleven"}).encode("\n")


def test_byte_chat() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.chat([{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "system: be\nuser: hi\nassistant: "


def test_protocol() -> None:
    tokenizer: Tokenizer = ByteTokenizer()
    assert tokenizer.fingerprint == ByteTokenizer().fingerprint


# --- fingerprints ------------------------------------------------------------------------


def test_case_12_swapped_ids_are_refused_by_name() -> None:
    swapped = ByteTokenizer({10: b"\x0b", 11: b"\x0a"})
    assert swapped.vocab_size == ByteTokenizer().vocab_size
    with pytest.raises(IncompatibleModelsError, match=r"differ at id 10: .*b'\\n'.*b'\\x0b'"):
        check_same_vocabulary(ByteTokenizer(), swapped)
    check_same_vocabulary(ByteTokenizer(), ByteTokenizer())


def test_other_sizes_are_refused() -> None:
    longer = ByteTokenizer({257: b"more"})
    with pytest.raises(IncompatibleModelsError, match="257 ids, the draft's 258"):
        check_same_vocabulary(ByteTokenizer(), longer)


def test_other_control_tokens_are_refused() -> None:
    table = [b"a", b"b", b"c"]
    one = TableTokenizerStub(table, {1})
    two = TableTokenizerStub(table, {2})
    with pytest.raises(IncompatibleModelsError, match="id 1: a control token"):
        check_same_vocabulary(one, two)  # type: ignore[arg-type]


class TableTokenizerStub(TableTokenizer):
    def __init__(self, table: list[bytes], special: set[int]) -> None:
        super().__init__(table, special_ids=special, eos_token_ids=())


def test_a_fingerprint_is_of_contents() -> None:
    known = fingerprint([b"a", b"bc"], {1})
    assert known == fingerprint((b"a", b"bc"), frozenset({1}))
    assert len(known) == 64
    others = [
        fingerprint([b"ab", b"c"], {1}),
        fingerprint([b"a", b"bc"], ()),
        fingerprint([b"a", b"bc", b""], {1}),
        fingerprint([b"bc", b"a"], {1}),
    ]
    assert len({known, *others}) == 5


# --- transformers tokenizers -------------------------------------------------------------


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, HFTokenizer]:
    theirs = trained(request.param)
    return theirs, HFTokenizer(theirs)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(pair: tuple[Any, HFTokenizer], text: str) -> None:
    theirs, ours = pair
    ids = ours.encode(text)
    expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    pieces = streamed(ours, ids)
    assert "".join(pieces) == ours.decode(ids) == expected == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_lone_tokens_lose_no_blank(pair: tuple[Any, HFTokenizer]) -> None:
    """A SentencePiece token decoded alone loses its blank; in a stream only the first may."""
    theirs, ours = pair
    ids = ours.encode("the quick fox")
    alone = "".join(theirs.decode([token]) for token in ids)
    assert "".join(streamed(ours, ids)) == "the quick fox"
    if ours.token_bytes(ids[0]).startswith(b" "):
        assert alone != "the quick fox", "the trap this test is about is gone"


def test_special_and_added_tokens(pair: tuple[Any, HFTokenizer]) -> None:
    theirs, ours = pair
    start, end = theirs.bos_token_id, theirs.eos_token_id
    added = theirs.convert_tokens_to_ids("<plain added>")
    assert {start, end} <= ours.special_ids
    assert added not in ours.special_ids
    assert ours.eos_token_ids == {end}
    fox = ours.encode("fox")
    assert ours.decode([start, *fox, end]) == "fox"
    assert ours.token_bytes(end) == b"</s>"
    assert ours.token_bytes(added) == b"<plain added>"
    assert ours.vocab_size == len(theirs) == added + 1


def test_chat_needs_a_template(pair: tuple[Any, HFTokenizer]) -> None:
    theirs, ours = pair
    messages = [{"role": "user", "content": "fox"}]
    with pytest.raises(EngineError, match="no chat template"):
        ours.chat(messages)
    theirs.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}<s>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>{% endif %}"
    )
    try:
        ids = ours.chat(messages)
        assert ids[0] == ids[-1] == theirs.bos_token_id
        assert ours.decode(ids) == "fox"
        with pytest.raises(EngineError, match="no tools"):
            ours.chat([{"role": "tool", "content": "x"}])
    finally:
        theirs.chat_template = None


def test_end_ids_of_the_generation_config_win(pair: tuple[Any, HFTokenizer]) -> None:
    assert HFTokenizer(pair[0], eos_token_ids=[0, 2]).eos_token_ids == {0, 2}


def test_the_two_styles_differ() -> None:
    one, two = HFTokenizer(trained("byte-level")), HFTokenizer(trained("sentencepiece"))
    with pytest.raises(IncompatibleModelsError, match="differ at id"):
        check_same_vocabulary(one, two)
    check_same_vocabulary(one, HFTokenizer(trained("byte-level")))


def test_a_tokenizer_without_a_known_decoder_is_asked() -> None:
    pytest.importorskip("transformers", reason="the torch extra is not installed")
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    ours = HFTokenizer(theirs)
    assert ours.encode("a c b") == [1, 3, 2]
    assert "".join(streamed(ours, [1, 3, 2])) == ours.decode([1, 3, 2])
    assert ours.decode([1, 3, 2]).split() == ["a", "c", "b"]
