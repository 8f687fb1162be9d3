"""Where MLIR's Python bindings look for the module of a dialect that is not one of their own."""
