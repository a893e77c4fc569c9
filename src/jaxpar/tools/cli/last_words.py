"""What a process said before it died, in one line.

As a program it stands beside a process whose standard error goes to a file: if that ends before it
writes to the program's standard input, the program says why. It imports little, to start soon.
"""

import os
import re
import sys

# A Python error may have been caught before.
_FATAL = (re.compile(r"^F[0-9]{4} |Check failed|Fatal"), re.compile(r"\w+Error: "), re.compile(""))
_FLAG = re.compile(r"Unknown flags? in (\w+): (.*)|Unknown command line (flag '.*')")


def last_words(log: str) -> str:
    if flag := _FLAG.search(log):
        variable, names = flag[1] or "LIBTPU_INIT_ARGS", flag[2] or flag[3]
        return f"{variable} has {names}, which this version does not know; remove it there"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for kind in _FATAL:
        # A compiler's message comes before its stack trace, and words without a kind last.
        if said := [line for line in lines if kind.search(line)]:
            return said[-1 if kind is _FATAL[-1] else 0][:400]
    return "it said nothing"


def main() -> None:
    descriptor = int(sys.argv[1])
    if not sys.stdin.read():
        os.lseek(descriptor, 0, os.SEEK_SET)
        with os.fdopen(descriptor, errors="replace") as log:
            reason = last_words(log.read())
        print(f"jaxpar: error: JAX ended the process as it started: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
