"""How the API server refuses: `Status` bodies in its own words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.stand_ins.kubernetes.resources import Resource


class ApiError(Exception):
    """An answer other than the one that was asked for."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code, self.reason, self.message = code, reason, message
        self.details, self.headers = dict(details or {}), dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The `Status` object."""
        status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        return status | ({"details": self.details} if self.details else {})


def _details(resource: Resource, name: str) -> dict[str, str]:
    return {"name": name, "kind": resource.plural} | ({"group": resource.group} if resource.group else {})


def not_found(resource: Resource, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{resource.qualified} "{name}" not found', details=_details(resource, name))


def namespace_not_found(namespace: str) -> ApiError:
    details = {"name": namespace, "kind": "namespaces"}
    return ApiError(404, "NotFound", f'namespaces "{namespace}" not found', details=details)


def already_exists(resource: Resource, name: str) -> ApiError:
    message = f'{resource.qualified} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, details=_details(resource, name))


def conflict(resource: Resource, name: str, cause: str) -> ApiError:
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {cause}'
    return ApiError(409, "Conflict", message, details=_details(resource, name))


def modified(resource: Resource, name: str) -> ApiError:
    cause = "the object has been modified; please apply your changes to the latest version and try again"
    return conflict(resource, name, cause)


def invalid(resource: Resource, name: str, causes: Sequence[str]) -> ApiError:
    """The answer to a value that the schema or the checks of names do not allow; a cause is `path: what is wrong`."""
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    listed = causes[0] if len(causes) == 1 else f"[{', '.join(causes)}]"
    parts = [cause.partition(": ") for cause in causes]
    details = {
        "name": name,
        "group": resource.group,
        "kind": resource.kind,
        "causes": [{"reason": "FieldValueInvalid", "message": text, "field": field} for field, _, text in parts],
    }
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {listed}', details=details)


def unknown_fields(resource: Resource, paths: Sequence[str]) -> ApiError:
    """The answer to fields that the schema lacks, under strict field validation."""
    fields = ", ".join(f'unknown field "{path}"' for path in paths)
    return bad_request(
        f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
        f"strict decoding error: {fields}"
    )


def denied_by_webhook(webhook: str, causes: Sequence[str]) -> ApiError:
    listed = causes[0] if len(causes) == 1 else f"[{', '.join(causes)}]"
    return ApiError(403, "Forbidden", f'admission webhook "{webhook}" denied the request: {listed}')


def forbidden(user: str, verb: str, resource: Resource, subresource: str, namespace: str | None, name: str) -> ApiError:
    plural = f"{resource.plural}/{subresource}" if subresource else resource.plural
    subject = f'{resource.qualified} "{name}"' if name else resource.qualified
    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    message = (
        f'{subject} is forbidden: User "{user}" cannot {verb} resource "{plural}" '
        f'in API group "{resource.group}" {where}'
    )
    return ApiError(403, "Forbidden", message, details=_details(resource, name))


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def expired(version: int, oldest: int) -> ApiError:
    return ApiError(410, "Expired", f"too old resource version: {version} ({oldest})")


def method_not_allowed() -> ApiError:
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def unsupported_patch(allowed: str) -> ApiError:
    message = f"the body of the request was in an unknown format - accepted media types include: {allowed}"
    return ApiError(415, "UnsupportedMediaType", message)


_OTHER_FAILURES = {
    401: ("Unauthorized", "Unauthorized"),
    429: ("TooManyRequests", "the server has received too many requests and has asked us to try again later"),
    500: ("InternalError", "Internal error occurred: etcdserver: leader changed"),
    503: ("ServiceUnavailable", "the server is currently unable to handle the request"),
    504: ("Timeout", "Timeout: request did not complete within the allotted timeout"),
}


def failure(code: int, retry_after_s: int | None = None) -> ApiError:
    """An answer that has nothing to do with the request: the server is overloaded, has lost its store, ..."""
    reason, message = _OTHER_FAILURES[code]
    return ApiError(code, reason, message, headers={"Retry-After": str(retry_after_s)} if retry_after_s else {})
