"""Typed errors. Each message names the item, the value and the limit; all are public API."""


class PurestepError(Exception):
    """Base of every error that purestep raises on purpose."""


class ConfigError(PurestepError, ValueError):
    """An engine option, or a combination of them, cannot work."""


class RequestError(PurestepError, ValueError):
    """A request was refused; the state it was submitted to is unchanged."""


class UnknownRequestError(RequestError, KeyError):
    """No live request has this id."""

    __str__ = Exception.__str__  # KeyError would show the repr of the message


class SamplingError(RequestError):
    """A sampling parameter is out of range or contradicts another one."""


class UnknownAdapterError(RequestError):
    """No adapter of this name is loaded or registered."""


class MediaError(RequestError):
    """A picture, or another media item of a prompt, cannot be used, or does not fit the prompt."""


class AdapterError(PurestepError, ValueError):
    """An adapter cannot be used: its files, its tensors or its settings are at fault."""


class CheckpointError(PurestepError, ValueError):
    """A model checkpoint cannot be used: architecture, tensor names or shapes are at fault."""


class SnapshotError(PurestepError, ValueError):
    """A snapshot does not fit the program it is restored into, or is damaged."""


class PolicyError(PurestepError, ValueError):
    """A scheduling policy returned an inadmissible choice."""


class DonatedStateError(PurestepError, RuntimeError):
    """The device state was already consumed by a step."""


class TornStateError(PurestepError, RuntimeError):
    """A step failed after it may have overwritten memory this state counts on."""


class ForkMemoryError(PurestepError, MemoryError):
    """Not enough memory for a second pool; `needed` and `free` are in bytes."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"the fork's pool needs {needed} bytes, {free} are free")
        self.needed, self.free = needed, free


class StepError(PurestepError, RuntimeError):
    """Schedule, execute and commit were called out of order."""


class InFlightError(StepError):
    """The next step cannot be planned before the one in flight is committed."""


class KernelError(PurestepError, RuntimeError):
    """A kernel cannot be compiled, or does not fit the device, for these shapes."""


class BatchFileError(PurestepError, ValueError):
    """A batch run cannot start or go on: its files contradict each other or an option."""


class BatchLineError(PurestepError, ValueError):
    """One line of a batch file cannot be run. `code` and `status` go into its error record."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status
