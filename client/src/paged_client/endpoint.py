"""Which server to talk to, and how: the reading of the `url` argument."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from paged_client.types import Protocol

_SCHEMES: dict[str, tuple[Protocol, bool]] = {
    "grpc": ("grpc", False),
    "grpcs": ("grpc", True),
    "http": ("http", False),
    "https": ("http", True),
}
_DEFAULT_PORT: dict[Protocol, int] = {"grpc": 8001, "http": 8000}


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens. `path` is the prefix a gateway puts before Triton's own paths (HTTP only)."""

    protocol: Protocol
    host: str
    port: int
    secure: bool = False
    path: str = ""

    @property
    def address(self) -> str:
        """`host:port`, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def base_url(self) -> str:
        """The URL that Triton's HTTP paths are appended to."""
        return f"http{'s' if self.secure else ''}://{self.address}{self.path}"


def parse_endpoint(url: str, protocol: Protocol | None = None) -> Endpoint:
    """Reads `host:port`, `host`, or either behind `grpc://`, `grpcs://` (TLS), `http://`, `https://`.

    The scheme decides the protocol. Without one `protocol` does; without that, port 8000 (Triton's HTTP port)
    means http and every other port grpc. A missing port is 8001 for gRPC, 8000 for http, 443 for https.
    Raises ValueError for another form, or where scheme and `protocol` disagree.
    """
    if protocol not in (None, "grpc", "http"):
        raise ValueError(f'protocol must be "grpc" or "http", got {protocol!r}')
    has_scheme = "://" in url
    parts = urlsplit(url if has_scheme else f"//{url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"url {url!r}: {error}") from None
    if not host:
        raise ValueError(f"url {url!r} names no host; write host:port, grpc://host:port or http://host:port")
    secure = False
    if has_scheme:
        if parts.scheme not in _SCHEMES:
            raise ValueError(f"url {url!r}: the scheme must be one of {', '.join(_SCHEMES)}")
        scheme_protocol, secure = _SCHEMES[parts.scheme]
        if protocol not in (None, scheme_protocol):
            raise ValueError(
                f"url {url!r} means protocol {scheme_protocol!r}, but protocol={protocol!r} was given"
            )
        protocol = scheme_protocol
    elif protocol is None:
        protocol = "http" if port == _DEFAULT_PORT["http"] else "grpc"
    path = parts.path.rstrip("/")
    if path and protocol == "grpc":
        raise ValueError(f"url {url!r}: a gRPC address has no path")
    if port is None:
        port = 443 if protocol == "http" and secure else _DEFAULT_PORT[protocol]
    return Endpoint(protocol, host, port, secure, path)
