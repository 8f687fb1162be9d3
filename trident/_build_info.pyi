# setup.py writes _build_info.py beside the extension that it builds.
TORCH_VERSION: str
TORCH_GIT_VERSION: str
PYTHON_VERSION: tuple[int, int]
