"""Which tokens are where and what moves next. Pure: no NumPy, no CuPy, no device, no clock."""
