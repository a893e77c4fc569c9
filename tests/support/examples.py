"""How many examples a property test tries."""

from hypothesis import settings

USUAL = 100  # what Hypothesis tries of a test that asks for no number


def examples(count, *, derandomize=False, **options):
    """Settings that try `count` examples, and 50 times as many, always others, when thorough."""
    times = settings.default.max_examples // USUAL
    derandomize = derandomize and times == 1
    return settings(max_examples=times * count, derandomize=derandomize, **options)
