"""Exceptions that users meet. Message = what, got, allowed, fix.

EngineError
├── ConfigError          a setting is wrong or contradicts another
├── ModelError           a model folder or file cannot be served (missing shard, wrong shape, unknown math)
├── CompileError         tracing, a pass, code generation or the numeric proof failed
├── ArtifactError        an artifact is damaged, or was made for another torch, target or schema
├── RequestError         one request is refused; every other request goes on
│   ├── InvalidRequest   a field has a wrong type or value (`param` names it)
│   ├── ContextTooLong   the prompt does not fit into the model's window
│   ├── ModelNotFound    the request names a model that is not served
│   ├── WrongTask        the model is not for this kind of request
│   ├── Overloaded       the queue is full; try again later
│   └── RequestAborted   the request was cancelled
├── SleepRefused         the engine cannot sleep now; nothing was given back
├── WakeFailed           the engine sleeps on: no memory, or the weights cannot be had again
├── ProfileRefused       a profile cannot be started or stopped now
├── OutOfBlocks          the KV pool cannot give another block (never reaches a client)
└── EngineDead           the engine process has ended; no request can be served
"""


def no_such_path(path: object) -> str:
    """What to tell a user who named a path where nothing is; every command says it in these words."""
    return f"{path}: no such file or folder; give an artifact, a model folder or a GGUF file"


LFS_POINTER = b"version https://git-lfs"
"""How the small file begins that a clone without Git LFS has in a large one's place."""


def is_pointer(path: object) -> str:
    """What to tell a user whose file is such a pointer."""
    return (
        f"{path}: a pointer of Git LFS in place of the file; run `git lfs pull` there, or download the file"
    )


class EngineError(Exception):
    """Root of all errors that ostinato raises on purpose."""


class ConfigError(EngineError):
    """A setting is wrong or contradicts another."""


class ModelError(EngineError):
    """A model folder or file cannot be served."""


class CompileError(EngineError):
    """Tracing, a pass, code generation or the numeric proof failed."""


class ArtifactError(EngineError):
    """An artifact is damaged or was made for another torch, target or schema."""


class RequestError(EngineError):
    """One request is refused. `param` names the field of the request, if one is to blame."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field has a wrong type or value."""


class ContextTooLong(RequestError):
    """The prompt does not fit into the model's window."""


class ModelNotFound(RequestError):
    """The request names a model that is not served."""


class WrongTask(RequestError):
    """The model is not for this kind of request."""


class Overloaded(RequestError):
    """The waiting queue is full."""


class RequestAborted(RequestError):
    """The request was cancelled by its client or by an operator."""


class SleepRefused(EngineError):
    """The engine cannot sleep now; nothing was given back."""


class WakeFailed(EngineError):
    """The engine sleeps on: there is no memory, or the weights cannot be had again."""


class ProfileRefused(EngineError):
    """A profile cannot be started, stopped or written now; nothing has changed."""


class OutOfBlocks(EngineError):
    """The KV pool cannot give another block."""


class EngineDead(EngineError):
    """The engine has ended; no request can be served."""
