"""Run-time checks of annotations, made once for each signature."""

from beartype import beartype

_checked = {}


def checked(signature):
    """As beartype, once for each signature: a function inside of another is made at every call.

    jaxtyping has a function without a body checked in place of each of the package's.
    """
    defaults = signature.__defaults__, tuple((signature.__kwdefaults__ or {}).items())
    annotations = tuple(signature.__annotations__.items())
    key = signature.__qualname__, signature.__module__, signature.__code__, annotations, defaults
    try:
        if key not in _checked:
            _checked[key] = beartype(signature)
    except TypeError:  # a default or an annotation that has no hash
        return beartype(signature)
    return _checked[key]
