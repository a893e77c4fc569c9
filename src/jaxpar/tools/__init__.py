"""What looks at a step from outside: programs, timelines, explanations, processes, commands.

Nothing outside of this folder imports it before one of its names is asked for."""
