"""Has the `Example:` of docstrings read as the section that the site's generator calls Examples."""

import griffe


class ExampleSections(griffe.Extension):
    """Renames the section of each docstring; the source keeps its own name for one example."""

    def on_instance(self, *, obj, **_):
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
