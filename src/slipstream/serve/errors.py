"""What a client is told when a request fails, in the JSON shape of the API that it speaks."""

from __future__ import annotations

from typing import Any

from slipstream.errors import SlipstreamError

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(SlipstreamError):
    """A request that is refused or cannot be finished. `param` names the field, `code` the reason, for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_s = retry_s

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds, at least 1, where a later try can succeed."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {} if self.retry_s is None else {"Retry-After": str(max(1, round(self.retry_s)))}

    def openai(self) -> dict[str, Any]:
        kind = _OPENAI_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        message = f"{self.param}: {self}" if self.param else str(self)
        return {"type": "error", "error": {"type": kind, "message": message}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)
