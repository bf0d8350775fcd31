"""The three kinds of trouble (design: errors): refused, scarcity, bug.

`Refused` is the client's or the capacity's fault and maps to one HTTP status. Scarcity is not an exception: functions
that can run out return None. `Bug` is a broken invariant: the instance that raised it is torn down, the process lives.
"""


class Refused(Exception):
    """A request that cannot be served as it stands; carries what the client needs to mend it.

    `message` is a fixed text that names the field and what is allowed; never a path, an address or a traceback.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class BadModel(Exception):
    """A checkpoint that cannot be loaded: the sentence names the file, the tensor or key, and what was expected."""


class BadConfig(Exception):
    """A setting that cannot be used: the sentence names it and the nearest allowed value. Exit code 2, no traceback."""


class Bug(Exception):
    """A broken invariant. Raised, never asserted, so that `python -O` keeps it."""


def require(condition: bool, message: str) -> None:
    """Raise `Bug(message)` unless `condition` holds."""
    if not condition:
        raise Bug(message)
