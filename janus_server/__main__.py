"""`python -m janus_server` is the `janus` command.

Called by the interpreter only. It holds nothing but the hand-over to `cli`.
"""

import sys

from janus_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
