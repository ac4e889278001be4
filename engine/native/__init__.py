"""The native CPU path: C++ kernels (csrc/), built once with the system's compiler, and their bindings.

`build` makes the library, `library` loads it and picks an instruction set, `structs` mirrors its structs. Models and
attention backends use these elsewhere; without a compiler torch's operators are used instead.
"""
