"""The page at /: a chat with the model and its load, in one file that asks no other server for anything."""

import functools
import pathlib

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@functools.cache
def page() -> str:
    return pathlib.Path(__file__).with_name("page.html").read_text(encoding="utf-8")
