"""The C library and the kernel, through cffi in ABI mode: nothing is compiled, at install or later."""
