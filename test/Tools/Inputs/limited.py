"""limited.py BYTES COMMAND...: runs the command, which cannot write files longer than that."""

import os
import resource
import sys

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
os.execvp(sys.argv[2], sys.argv[2:])
