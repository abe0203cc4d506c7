"""Roles of messages: what looks misspelt is refused, and so is a conversation that ends with another role."""

import pytest

from realrl.config.errors import UserError

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([USER, {"role": "assistent", "content": "b"}, USER, ASSISTANT], "did you mean assistant?"),
        (
            [{"role": "sytem", "content": "a"}, USER, ASSISTANT],
            "'messages.role' is 'sytem'; did you mean system?",
        ),
        ([USER, {"role": "bot", "content": "b"}], "must end with role 'assistant', not 'bot'"),
        ([ASSISTANT], "must have several turns"),
    ],
)
def test_an_answer_that_would_not_be_learnt_is_refused(load, chat_tokenizer, turns, words):
    with pytest.raises(UserError, match=words.replace("?", r"\?")):
        load([{"messages": turns}], "answer", ("tokens", "loss_mask"))


def test_roles_that_only_the_template_knows_are_read(load, chat_tokenizer, write):
    source = write([{"messages": [USER, {"role": "critic", "content": "c"}, ASSISTANT]}])
    data = load(source, "answer", ("tokens", "loss_mask"))
    assert (len(data), data.skipped) == (1, 0)
