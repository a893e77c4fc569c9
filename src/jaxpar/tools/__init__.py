"""Tools that analyse a step: programs, timelines, explanations, processes, commands.

`program` reads instructions from the compiler's text, without a chip's figures. `timeline` computes
times from operations and figures, without the text. `explain` finds causes and edits. Nothing
outside of this folder imports it before a user asks for one of its names.
"""
