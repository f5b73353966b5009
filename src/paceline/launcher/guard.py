"""`python -m paceline.launcher.guard PID COMMAND...`: become COMMAND, to be killed when process PID dies.

For servers that are not ours and would outlive a launcher that is killed with SIGKILL.
"""

from __future__ import annotations

import os
import sys

from paceline.rpc.parent import die_with_parent


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
