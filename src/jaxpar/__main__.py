"""`python -m jaxpar`."""

import sys

from jaxpar.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
