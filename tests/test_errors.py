"""The catalogue of errors has the messages of the source, and tests that are there."""

import re

import errors

PAGE = errors.PAGE.read_text()


def test_the_page_is_what_its_entries_make():
    assert errors.render(errors.catalogue(errors.entries_of(PAGE))) == PAGE, "run: nox -s errors"


def test_nine_of_ten_messages_have_an_entry():
    known = len(errors.messages())
    assert len(errors.catalogue(errors.entries_of(PAGE))) >= 0.9 * known > 200, "run: nox -s errors"


def test_the_tests_that_raise_them_are_there():
    for entry in errors.entries_of(PAGE):
        file, *_, name = re.split("::", entry["test"])
        assert f"def {name}(" in (errors.ROOT / file).read_text(), entry


def test_a_changed_message_is_missed():
    entries = errors.entries_of(PAGE)
    found = errors.catalogue(entries)
    wrong = [{**entry, "text": "other words, of no message"} for entry in entries]
    assert found
    assert not errors.catalogue(wrong)
