"""From a recorded guard tree and a code object to a guard table and native code.

Importing this package costs nothing: MLIR is loaded by ``trident.codegen.pipeline``, at the first
build. ``frame_plan`` is pure standard library.
"""
