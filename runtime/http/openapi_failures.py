"""The errors that a route can answer with, for /openapi.json: statuses and codes of `api_errors.TABLE`."""

from __future__ import annotations

from ostinato.errors import (
    ContextTooLong,
    EngineDead,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ProfileRefused,
    RequestAborted,
    SleepRefused,
    WakeFailed,
    WrongTask,
)
from ostinato.runtime.http.api_errors import (
    INTERNAL,
    TABLE,
    BadKey,
    BodyEncoded,
    BodyTimeout,
    BodyTooLarge,
    ConnectionsFull,
    Draining,
    GenerationTimeout,
    NoAdmin,
    ResponseNotFound,
    UnknownRoute,
)
from ostinato.runtime.http.key_limits import RateLimited
from ostinato.runtime.http.web_origins import ForeignOrigin

_Kinds = tuple[type[Exception], ...]

_ANY_ROUTE: _Kinds = (InvalidRequest, ForeignOrigin, EngineError, ConnectionsFull)
_BODY: _Kinds = (ModelNotFound, BodyTimeout, BodyTooLarge, BodyEncoded, Overloaded)
_WORK: _Kinds = (ContextTooLong, WrongTask, Draining, RequestAborted, EngineDead, GenerationTimeout)
_UNDER: dict[str, _Kinds] = {
    "/admin/": (NoAdmin, EngineDead),
    "/admin/sleep": (SleepRefused,),
    "/admin/wake": (WakeFailed,),
    "/admin/profile/": (ProfileRefused,),
    "/page/": (UnknownRoute,),
    "/v1/models/": (ModelNotFound,),
    "/v1/responses": (ResponseNotFound,),
}


def failures(method: str, path: str, *, has_body: bool, needs_key: bool) -> dict[int, str]:
    """Each status, and the codes that its error bodies may have."""
    is_admin = path.startswith("/admin/")
    kinds = _ANY_ROUTE
    for start, others in _UNDER.items():
        if path.startswith(start):
            kinds += others
    if has_body:
        kinds += _BODY if is_admin else (*_BODY, *_WORK)
    if needs_key:
        kinds += (BadKey,)
    if method == "POST" and not is_admin:
        kinds += (RateLimited,)
    found: dict[int, set[str]] = {INTERNAL.status: {str(INTERNAL.code)}}
    for kind in kinds:
        answer = next(answer for parent, answer in TABLE if issubclass(kind, parent))
        found.setdefault(answer.status, set()).add(str(answer.code))
    return {status: ", ".join(f"`{code}`" for code in sorted(found[status])) for status in sorted(found)}
