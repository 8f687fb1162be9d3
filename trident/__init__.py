"""Trident: guarded dispatch of ``torch.compile``d code without Dynamo's host overhead.

``trident.enable()`` around an existing script is all there is to it; see `enable`, `explain` and
`stats`.
"""

from trident._build_check import check as _check

_check()

from trident import capture, settings  # noqa: E402
from trident.control import disable, enable, is_enabled, runtime  # noqa: E402
from trident.errors import (  # noqa: E402
    BuildMismatchError,
    TridentError,
    UnsupportedGraph,
    UnsupportedGuard,
    UnsupportedPlan,
)
from trident.report import explain, reset_stats, stats  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "BuildMismatchError",
    "TridentError",
    "UnsupportedGraph",
    "UnsupportedGuard",
    "UnsupportedPlan",
    "disable",
    "enable",
    "explain",
    "is_enabled",
    "reset_stats",
    "stats",
]

capture.dynamo.name_backend("trident", "trident.backend:compile_graph")
if not settings.disabled():
    capture.install()
    capture.set_listener(runtime)
