"""The catalogue of errors has the messages of the source, and tests that are there."""

import re

import errors

PAGE = errors.PAGE.read_text()


def test_the_page_is_what_its_entries_make():
    assert errors.render(errors.catalogue(errors.entries_of(PAGE))) == PAGE, "run: nox -s errors"


def test_every_message_has_an_entry():
    found = errors.catalogue(errors.entries_of(PAGE))
    missing = [message for message in errors.messages() if message not in found]
    assert not missing, "raise it in a test, then run: nox -s errors"
    assert len(found) > 300


def test_every_entry_has_its_cause_and_its_fix():
    count = len(errors.entries_of(PAGE))
    assert len(re.findall("^- Cause: .", PAGE, re.M)) == count
    assert len(re.findall("^- Fix: .", PAGE, re.M)) == count


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
