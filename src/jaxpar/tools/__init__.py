"""What looks at a step from outside: programs, timelines, explanations, processes, commands.

A program is first read, then played, then explained. `program` finds out what its instructions
are, from the compiler's text and without a chip's figures. `timeline` finds out what time it is,
from operations and figures and without the text. `explain` finds out why, and what to change.
Nothing outside of this folder imports it before a user asks for one of its names.
"""
