"""What the command line's options take, and how it speaks."""

import argparse
import sys


def size(text: str) -> int:
    """Bytes, also as 64KiB, 20MiB or 1.5GiB."""
    units = {"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
    number, unit = (text[:-3], text[-3:]) if text[-3:] in units else (text, "")
    try:
        found = float(number) * 2 ** units[unit] if unit else int(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 1000, 20MiB, 1.5GiB") from None
    if not 1 <= found < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 to 2**63 - 1 bytes")
    return int(found)


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def gpus(text: str) -> float:
    """None, a share of one, or a whole number."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not (0 <= found <= 1 or (found < 2**16 and found.is_integer() and found > 0)):
        raise argparse.ArgumentTypeError(f"{text!r} must be 0 to 1, or a whole number")
    return found


def seconds(text: str) -> float:
    """A time that a socket can wait for."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0, and at most 86400 seconds")
    return found


def named_path(text: str) -> tuple[str, str]:
    """NAME=PATH."""
    return _pair(text, "NAME=PATH")


def default_adapter(text: str) -> tuple[str, str]:
    """MODALITY=NAME."""
    return _pair(text, "MODALITY=NAME")


def _pair(text: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} must be {form}")
    return name, value


def say(text: str) -> None:
    """A line for people, beside what is printed for programs."""
    print(text, file=sys.stderr, flush=True)
