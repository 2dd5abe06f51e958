"""One step, one graph: `jit_compile=True`. See the README beside this file."""
