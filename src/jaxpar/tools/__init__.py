"""Tools that analyse a step: programs, timelines, explanations, processes, commands.

`program` reads the compiler's text, without a chip's figures. `timeline` computes times, without
the text. `explain` finds causes and edits. Nothing outside imports this folder before a user asks
for a name.
"""
