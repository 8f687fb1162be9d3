"""Putting the capture on and taking it off again."""

from __future__ import annotations

from trident.capture import inductor, lifecycle, recorder


def install() -> None:
    """Records guards and watches cache entries from now on. Idempotent; costs only while Dynamo
    compiles. Raises TridentError naming what this torch lacks; then nothing is changed."""
    recorder.install()
    try:
        lifecycle.install()
    except BaseException:
        recorder.uninstall()
        raise
    inductor.install()


def uninstall() -> None:
    """Restores what :func:`install` replaced, and removes all specializations."""
    inductor.uninstall()
    lifecycle.uninstall()
    recorder.uninstall()


def is_installed() -> bool:
    """Whether Dynamo's compilations are being recorded."""
    return recorder.is_installed()
