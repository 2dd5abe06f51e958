"""Numbers for people."""


def size(nbytes: float) -> str:
    """Bytes in a unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"


def operations(flops: float) -> str:
    for unit in ("", "k", "M", "G", "T", "P"):
        if flops < 1000:
            return f"{flops:.1f} {unit}FLOP"
        flops /= 1000
    return f"{flops:,.1f} EFLOP"


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
