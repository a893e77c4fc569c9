"""Prepares docstrings and signatures for the pages of the API.

An example stands before long arguments, and aliases of types are spelled out. The source keeps its
own order and its own names.
"""

import dataclasses
import re
from importlib import import_module

import griffe

from jaxpar.arguments.lazy_names import SHOWN

PACKAGES = ("", ".layers", ".layout", ".moe", ".schedule", ".testing")
LINKED = {"AxisLike", "Mode", "Tree", "TreeDim"}  # explained under "Types" of docs/api/jaxpar.md
SECTION = re.compile(r"^(?:Args|Attributes|Returns|Raises|Yields|Cost|Source):", re.M)
EXAMPLE = re.compile(r"^Example:\n(?:[ \t]+.*\n|\n)*", re.M)


class ExampleSections(griffe.Extension):
    """Moves examples up, and spells out the aliases of types in annotations."""

    def on_instance(self, *, obj, **_):
        if obj.docstring is not None:
            obj.docstring.value = arranged(obj.docstring.value)

    def on_package(self, *, pkg, loader, **_):
        for package in PACKAGES:  # loading all modules fills SHOWN
            module = import_module(f"jaxpar{package}")
            for name in module.__all__:
                getattr(module, name)
        Aliases(loader).spell_out(pkg)


def arranged(text):
    """Returns a docstring with its example before its first section."""
    found, first = EXAMPLE.search(f"{text}\n"), SECTION.search(text)
    if found is not None:
        example = found[0].replace("Example:", "Examples:", 1).strip("\n")
        rest = f"{text}\n".replace(found[0], "", 1)
        at = first.start() if first and first.start() < found.start() else found.start()
        text = f"{rest[:at]}{example}\n\n{rest[at:]}".strip("\n")
    return re.sub(r"^(Cost|Source):", r"**\1:**", text, flags=re.M)


class Aliases:
    """The aliases of types that a package defines."""

    def __init__(self, loader):
        self.modules = loader.modules_collection

    def spell_out(self, parent):
        """Replaces the aliases in the annotations of all members."""
        for name, member in list(parent.members.items()):
            if member.is_alias:
                continue
            if member.is_module or member.is_class:
                self.spell_out(member)
            elif member.is_function:
                if name == "__init__" and "Args" not in sections(parent):
                    parent.del_member(name)  # jaxpar makes these objects, not the user
                    continue
                member.returns = self.written(member.returns)
                for parameter in member.parameters:
                    parameter.annotation = self.written(parameter.annotation)
                    parameter.default = self.written(parameter.default)
            elif member.is_attribute:
                member.annotation = self.written(member.annotation)

    def written(self, annotation):
        """Returns an annotation with the meaning of each alias in the place of its name."""
        if isinstance(annotation, list):
            return [self.written(part) for part in annotation]
        if isinstance(annotation, griffe.ExprName):
            return self.meaning(annotation)
        if isinstance(annotation, griffe.Expr):
            annotation = dataclasses.replace(annotation)
            for field in dataclasses.fields(annotation):
                if field.name != "parent":
                    setattr(annotation, field.name, self.written(getattr(annotation, field.name)))
        return annotation

    def meaning(self, name):
        """Returns what a name stands for, or the name in the module that defines it."""
        if not name.canonical_path.startswith("jaxpar."):
            return name
        try:
            found = self.modules[name.canonical_path]
            found = found.final_target if found.is_alias else found
        except (KeyError, griffe.AliasResolutionError):
            return name
        if found.name in LINKED or not found.is_attribute:
            return griffe.ExprName(found.name, parent=found.parent)
        if found.name in SHOWN:
            here = griffe.Docstring("", parent=found.parent)
            return griffe.parse_docstring_annotation(SHOWN[found.name], here)
        return name if found.value is None else self.written(found.value)


def sections(parent):
    return re.findall(r"^(\w+):$", parent.docstring.value, re.M) if parent.docstring else []
