"""The op families of the CUDA device: launchers of the kernels in ``cuda_src``, one file per family."""
