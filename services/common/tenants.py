"""Which tenants a caller may act for. The identity decides; a request only chooses among them."""

import grpc

from services.common.errors import KvblendError
from services.common.identity import DEFAULT_TENANT

ANY_TENANT = "*"
_BEARER = "Bearer "


class TenantPolicy:
    """Bearer token -> tenants it may act for ("*": any). Without tokens every local caller may act for any.

    A caller's default tenant is the first of its list ("default" for "*").
    """

    def __init__(self, tokens: dict[str, list[str]]) -> None:
        self._tokens = tokens

    def tenant_for(self, context: grpc.ServicerContext, requested: str) -> str:
        """Raises KvblendError UNAUTHENTICATED or TENANT_NOT_ALLOWED."""
        if not self._tokens:
            return requested or DEFAULT_TENANT
        header = dict(context.invocation_metadata()).get("authorization", "")
        allowed = self._tokens.get(str(header).removeprefix(_BEARER))
        if allowed is None:
            raise KvblendError("UNAUTHENTICATED", "a known bearer token is needed in the authorization metadata")
        if ANY_TENANT in allowed:
            return requested or DEFAULT_TENANT
        if not requested:
            return allowed[0]
        if requested not in allowed:
            raise KvblendError("TENANT_NOT_ALLOWED", f"this caller may not act for tenant {requested!r}")
        return requested
