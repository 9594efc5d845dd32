"""Serve the predictions of a run over HTTP: a JSON API, and a page to play with.

app = dubito.serving.application("houses/")     # an ASGI application
dubito.serving.serve("houses/", port=8000)      # the same with uvicorn, as `dubito serve houses/`
"""

from dubito.uses.serving.application import application
from dubito.uses.serving.limits import ServingLimits
from dubito.uses.serving.server import check_installed, is_loopback, serve

__all__ = ["ServingLimits", "application", "check_installed", "is_loopback", "serve"]
