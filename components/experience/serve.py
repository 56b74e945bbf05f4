"""Redis as the main process of a pod: reachable by the run's other pods, with the password from REDIS_PASSWORD."""

from __future__ import annotations

import os

from components.experience.redis_server import redis_binary
from configs.failure import BadConfig

PORT = 6379
FOLDER = "/data"


def serve() -> None:
    """Become redis-server.

    Raises:
        BadConfig: there is no password.
    """
    password = os.environ.get("REDIS_PASSWORD", "")
    if not password or any(character.isspace() or character in '"\\' for character in password):
        raise BadConfig(
            "REDIS_PASSWORD is empty or holds white space, quotes or backslashes; put a plain one into secret tandem-redis"
        )
    settings = (
        f'port {PORT}\nbind * -::*\ndir {FOLDER}\nappendonly yes\nappendfsync always\nsave ""\n'
        f'requirepass "{password}"\nprotected-mode yes\ndaemonize no\n'
    )
    # On standard input the password is in no command line and no file.
    reading, writing = os.pipe()
    os.write(writing, settings.encode())
    os.close(writing)
    os.dup2(reading, 0)
    binary = redis_binary()
    os.execv(binary, [binary, "-"])


if __name__ == "__main__":
    import sys

    from configs.failure import Failure

    try:
        serve()
    except Failure as failure:
        print(failure.sentence, file=sys.stderr, flush=True)
        sys.exit(failure.exit_code)
