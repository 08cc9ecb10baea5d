"""A recipe's data section: what contradicts itself is refused in one line."""

import pytest

from shardlab.errors import UserError
from shardlab.recipe import Recipe


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"format": "chat"}, "format chat needs files of records (.jsonl, .parquet, a dataset), not a source"),
        ({"streaming": True}, "streaming can't hold out a fraction of what it has not read; give evaluation_files"),
        ({"on_bad_record": "ignore"}, "data.on_bad_record: expected error, skip or replace"),
        ({"columns": {"txt": "body"}}, "unknown key data.columns.txt; did you mean text?"),
        ({"dataset_text_field": "body"}, "unknown key data.dataset_text_field; did you mean data.columns.text?"),
        ({"pack": True}, "unknown key data.pack; did you mean packing?"),
        ({"max_record_bytes": 0}, "data.max_record_bytes: expected a number above 0"),
    ],
)
def test_what_cannot_be_is_refused(data, complaint):
    with pytest.raises(UserError) as caught:
        Recipe.from_dict({"data": data})
    assert complaint in str(caught.value)


def test_a_stream_may_have_its_evaluation_files_or_none():
    for more in ({"evaluation_fraction": 0.0}, {"evaluation_files": ["held.txt"]}):
        assert Recipe.from_dict({"data": {"streaming": True, **more}}).data.streaming
