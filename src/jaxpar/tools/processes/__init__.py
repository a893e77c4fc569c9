"""Programs of several processes: their start, what must be equal in all of them, who is where."""

from jaxpar.tools.processes.agree import agree
from jaxpar.tools.processes.describe import Description, describe
from jaxpar.tools.processes.guard import guard
from jaxpar.tools.processes.start import initialize

__all__ = ["Description", "agree", "describe", "guard", "initialize"]
