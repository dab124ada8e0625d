"""The router is tested in front of the server, so with what the server's tests have."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1] / "api"))
