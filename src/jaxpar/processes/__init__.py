"""Programs of several processes: their start, what must be equal in all of them, who is where."""

from jaxpar.processes._agree import agree
from jaxpar.processes._describe import Description, describe
from jaxpar.processes._guard import guard
from jaxpar.processes._start import initialize

__all__ = ["Description", "agree", "describe", "guard", "initialize"]
