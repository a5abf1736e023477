"""A unix socket beside one of gRPC's, for whoever may connect to that one: its path has a suffix more."""

import socket
import socketserver
import stat
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.common.logs import get_logger

_log = get_logger("sockets")

# Between two looks whether it is closing.
_LOOK_SECONDS = 0.1
_SO_PEERGROUPS = 59


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A thread a connection, up to a limit; connections end with the server."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, beside: Path, suffix: str, handler: type[socketserver.BaseRequestHandler], most_connections: int
    ) -> None:
        """`beside` is the bound socket of gRPC. Raises OSError: the path is too long or not to be written."""
        self.request_queue_size = min(most_connections, socket.SOMAXCONN)
        self._beside = beside
        self._path = Path(f"{beside}{suffix}")
        self._most_connections = most_connections
        self._connections: set[socket.socket] = set()
        self._connections_lock = threading.Lock()
        if self._path.is_socket():
            # Of a process that was killed.
            self._path.unlink()
        super().__init__(str(self._path), handler)
        self._inode = self._path.stat().st_ino
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_LOOK_SECONDS,), name=f"accept{suffix}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop_accepting(self) -> None:
        if self.socket.fileno() < 0:
            # It has stopped. What is there now is the next process's, with the same inode number perhaps.
            return
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()
        with suppress(FileNotFoundError):
            # The next process may have made its own already.
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def close(self) -> None:
        """Ends every connection."""
        self.stop_accepting()
        with self._connections_lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            # No descriptor is left, say: the caller stays at the door, and would be asked in again at once.
            time.sleep(_LOOK_SECONDS)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """The kernel asked the mode of this socket, made like gRPC's; here is that of gRPC's own, as it is now."""
        del client_address
        with self._connections_lock:
            full = len(self._connections) >= self._most_connections
        if full or not may_connect(request, self._beside):
            _log.warning("a connection is refused", reason="too many" if full else "its user may not use the service")
            return False
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._connections_lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._connections_lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request, client_address
        _log.error("unexpected error in a connection", exc_info=True)


def may_connect(peer: socket.socket, path: Path) -> bool:
    """Whether the process at the other end could connect to the socket at `path`."""
    _, user, group = struct.unpack("iII", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        facts = path.stat()
        if user in (0, facts.st_uid):
            return user == 0 or bool(facts.st_mode & stat.S_IWUSR)
        groups = struct.iter_unpack("I", peer.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024))
        member = facts.st_gid in (group, *(other for (other,) in groups))
    except OSError:
        return False
    return bool(facts.st_mode & (stat.S_IWGRP if member else stat.S_IWOTH))
